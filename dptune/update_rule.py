"""The update rule of a run: optimiser, schedule of the learning rate, and which weights a run ends with. Public.

All of it works on releases, on public settings and on the noise that the mechanism states, so it costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Le

from dptune.bounds import Chance, Share
from dptune.errors import ConfigError

Optimizer = Literal["adamw", "adam_bc", "sgd"]
RateSchedule = Literal["constant", "linear", "cosine"]
Average = Literal["none", "ema", "tail"]
#: Version of each optimiser and each average of the weights. Raise one when a change moves the weights that it gives:
#: tests/golden says when.
VERSIONS = {"optimizer adamw": 1, "optimizer adam_bc": 1, "optimizer sgd": 1, "average ema": 1, "average tail": 1}
PartOfAll = Annotated[float, Gt(0), Le(1)]


@dataclass(frozen=True)
class UpdateRule:
    """How released gradients move the weights.

    Attributes:
        optimizer: "adamw"; "adam_bc", DP-AdamBC (Tang et al. 2024), which takes the noise out of Adam's second moment;
            or "sgd" with momentum.
        momentum: momentum of sgd.
        noise_floor: the least share of the noise in the second moment that adam_bc leaves in it. With a small one,
            steps explode where the corrected moment is about zero.
        schedule: learning rate after warm-up: "constant", or falling to ``final_share`` of it in a line or a cosine.
        final_share: share of the learning rate that a falling schedule ends at.
        average: the weights that a run ends with: the last ("none"), their moving average ("ema"), or the mean of those
            after the last steps ("tail"). Training goes on with the last in any case.
        average_share: share of the steps that a tail averages; at least as many as correlated noise has bands.
        average_decay: decay of the moving average in a step.
    """

    optimizer: Optimizer = "adamw"
    momentum: Chance = 0.9
    noise_floor: PartOfAll = 0.5
    schedule: RateSchedule = "constant"
    final_share: Share = 0.0
    average: Average = "none"
    average_share: PartOfAll = 0.1
    average_decay: Chance = 0.9

    def __post_init__(self) -> None:
        for name, kind in (("optimizer", Optimizer), ("schedule", RateSchedule), ("average", Average)):
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(get_args(kind))
                raise ConfigError(name, f"unknown {getattr(self, name)!r}", fix=f"use {known}")
        for name, lowest, highest in (
            ("momentum", False, False),
            ("noise_floor", False, True),
            ("final_share", True, True),
            ("average_share", False, True),
            ("average_decay", False, False),
        ):
            _check_share(name, getattr(self, name), lowest, highest)

    def rate_share(self, row: int, steps: int, warmup_steps: int) -> float:
        """The share of the learning rate after warm-up at release ``row`` of ``steps``, counted from 0."""
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, max(0.0, (row - warmup_steps) / max(1, steps - warmup_steps)))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.final_share + (1 - self.final_share) * left

    def first_averaged(self, steps: int, bands: int) -> int:
        """The first release whose weights enter a tail's mean, counted from 0."""
        return max(0, steps - max(math.ceil(self.average_share * steps), bands)) if self.average == "tail" else 0


def _check_share(name: str, value: Any, lowest: bool, highest: bool) -> None:
    """Raise ConfigError unless ``value`` is in the unit interval, whose ends count if the booleans say so."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (0 < value < 1 or (lowest and value == 0) or (highest and value == 1))):
        interval = f"{'[' if lowest else '('}0, 1{']' if highest else ')'}"
        raise ConfigError(
            name, f"{value!r} is not in {interval}", fix=f"leave it out for {UpdateRule().__dict__[name]}"
        )
