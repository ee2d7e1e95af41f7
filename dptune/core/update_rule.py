"""Update rule of a run: optimiser, schedule of the learning rate, and which weights a run ends with. Public.

All of it works on releases, on public settings and on the noise that the mechanism states, so it costs no privacy.

Example:
    >>> UpdateRule(schedule="linear").rate_share(row=6, steps=10, warmup_steps=2)
    0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Le

from dptune.core.bounds import Chance, Share
from dptune.core.declarations import check

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
        optimizer: "adamw"; "adam_bc", Adam that subtracts the known noise variance from its second moment (DP-AdamBC,
            Tang et al. 2024); or "sgd" with momentum.
        momentum: momentum of optimizer sgd.
        noise_floor: least share of the noise that adam_bc leaves in the second moment; a small one makes steps explode.
        schedule: learning rate after warm-up: "constant", or falling to final_share of it in a line or a cosine.
        final_share: share of the learning rate that a falling schedule ends at.
        average: weights that a run ends with: the last ones ("none"), their moving average ("ema"), or the mean of
            those after the last steps ("tail").
        average_share: share of the steps that average tail uses; at least as many as correlated noise has bands.
        average_decay: decay of average ema in one step.
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
        """Raises: ConfigError for a value of the wrong type or out of bounds."""
        check(self)

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
