"""The section `policy.rlhf`: private reinforcement learning of the public model on users' prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen
from pydantic import ValidationError

from dptune.core.bounds import Chance, Delta, Epsilon, Few, FewOrZero, Seed
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.policy.language.schedule import BanditSettings
from tasks.settings.library_section import LibrarySection, read_section
from tasks.settings.strict import STRICT
from tasks.settings.strict_yaml import load_assignments, refusal

_FEWEST_CANARIES = 12
_LORA = Lora(rank=4, alpha=8, dropout=0.0)


@dataclass(frozen=True, kw_only=True)
class Rlhf(BanditSettings):
    """Policy gradient on a language model, for every combination of ``users``, ``epsilons`` and ``seeds``.

    ``nonprivate`` adds one run without noise for each number of users. Under private ``telemetry`` no canary is planted
    and nothing is attacked, because the prompts of canaries are private records too.

    Attributes:
        users: numbers K of prompts an update to compare.
        epsilons: budgets to compare.
        nonprivate: whether one run without noise is made for each number of users.
        seeds: seeds of initial adapters and samples; public.
        delta: delta of every epsilon.
        lora: the adapters; without dropout.
        baseline_prompts: number of public prompts whose mean reward is the baseline.
        held_out_prompts: number of public prompts that the reward is measured on.
        canaries: number of secrets that fair coins plant in users' prompts: 12 or more, or 0.
        candidates: number of secrets never planted, to rank each planted one against.
        confidence: confidence of each lower bound.
        false_alarms: chance that a sound run is accused.
        telemetry: "private" plants no canary and attacks nothing.
    """

    __pydantic_config__ = STRICT

    users: Annotated[tuple[Few, ...], MinLen(1)] = (32, 128)
    epsilons: tuple[Epsilon, ...] = (3.0, 1.0)
    nonprivate: bool = True
    seeds: Annotated[tuple[Seed, ...], MinLen(1)] = (0,)
    delta: Delta = 1e-5
    lora: Annotated[Lora, LibrarySection(("rank", "alpha", "dropout"))] = _LORA
    baseline_prompts: Annotated[Few, Ge(2)] = 64
    held_out_prompts: Few = 200
    canaries: FewOrZero = 256
    candidates: Few = 63
    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.95
    false_alarms: Chance = 1e-3
    telemetry: Literal["research", "private"] = "research"

    def __post_init__(self) -> None:
        """Raises: ConfigError naming the setting that is out of range, or forbidden under private telemetry."""
        super().__post_init__()
        if self.telemetry == "private" and self.nonprivate:
            raise ConfigError("nonprivate", "private telemetry cannot hold without noise", fix="use false, or research")
        if 0 < self.canaries < _FEWEST_CANARIES:
            problem = f"{self.canaries} coins may well all fall alike"
            raise ConfigError("canaries", problem, fix=f"use 0, or {_FEWEST_CANARIES} or more")
        if self.lora.dropout:
            problem = "dropout makes the probability ratio of unchanged adapters differ from 1"
            raise ConfigError("lora", problem, fix="use dropout: 0")


def settings_of(options: Iterable[str]) -> Rlhf:
    """Make settings from ``NAME=VALUE`` texts, whose values are YAML; a single value stands for a list of one.

    Raises: ConfigError naming what is unknown or out of range.
    """
    values = load_assignments(options)
    for name in ("users", "epsilons", "seeds"):
        if name in values and not isinstance(values[name], list):
            values[name] = [values[name]]
    try:
        return read_section(Rlhf, values)
    except ValidationError as error:
        raise refusal(error, "policy.rlhf", values) from None
