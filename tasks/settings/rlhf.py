"""Settings of private reinforcement learning of the public model on users' prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tasks.settings.bounds import Chance, Delta, Epsilon, Few, LearningRate, Positive, Rank, Seed, StrictModel
from tasks.settings.refusals import refusal
from tasks.settings.strict_yaml import load_assignments

_FEWEST_CANARIES = 12
NotNegative = Annotated[float, Field(ge=0, le=1e9)]


class Rlhf(StrictModel):
    """Policy gradient on a language model: the grid is users x epsilons x seeds, and one run without noise for each
    number of users if ``nonprivate``. See ``dptune.policy.language.schedule.Bandit`` for the schedule's names.
    Under private ``telemetry`` no canary is planted and nothing attacked: the prompts of canaries are records too.
    """

    users: Annotated[tuple[Few, ...], Field(min_length=1)] = (32, 128)
    epsilons: tuple[Epsilon, ...] = (3.0, 1.0)
    nonprivate: bool = True
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0,)
    delta: Delta = 1e-5
    updates: Few = 24
    prompt_tokens: Few = 32
    new_tokens: Few = 24
    rank: Rank = 4
    alpha: Few = 8
    kl_weight: NotNegative = 0.2
    learning_rate: LearningRate = 1e-2
    epochs: Few = 2
    radius: Positive | None = None
    trust: Positive = 0.2
    miss: Chance = 0.1
    server_step: Positive = 1.0
    prompt_weight: NotNegative = 0.0
    evaluate_every: Few = 6
    baseline_prompts: Annotated[Few, Field(ge=2)] = 64
    held_out_prompts: Few = 200
    canaries: Annotated[int, Field(ge=0, le=10**6)] = 256
    candidates: Few = 63
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    false_alarms: Chance = 1e-3
    telemetry: Literal["research", "private"] = "research"

    @model_validator(mode="after")
    def _without_leaks(self) -> Rlhf:
        if self.telemetry == "private" and self.nonprivate:
            raise ValueError("nonprivate: private telemetry cannot hold without noise: use false, or research")
        return self

    @field_validator("canaries")
    @classmethod
    def _enough(cls, count: int) -> int:
        if 0 < count < _FEWEST_CANARIES:
            raise ValueError(f"{count} coins may well all fall alike: use 0, or {_FEWEST_CANARIES} or more")
        return count


def settings_of(options: Iterable[str]) -> Rlhf:
    """Of ``name=value`` texts, values as YAML has them; one value is a list of one. Raises: ConfigError by name."""
    values = load_assignments(options)
    for name in ("users", "epsilons", "seeds"):
        if name in values and not isinstance(values[name], list):
            values[name] = [values[name]]
    try:
        return Rlhf.model_validate(values)
    except ValidationError as error:
        raise refusal(error, "policy.rlhf", values) from None
