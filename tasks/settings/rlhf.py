"""The section `policy.rlhf`: private reinforcement learning of the public model on users' prompts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from dptune.bounds import Chance, Delta, Epsilon, Few, FewOrZero, LearningRate, Positive, Rank, Seed
from tasks.settings.refusals import refusal
from tasks.settings.strict import StrictModel
from tasks.settings.strict_yaml import load_assignments

_FEWEST_CANARIES = 12
NotNegative = Annotated[float, Field(ge=0, le=1e9)]


class Rlhf(StrictModel):
    """Policy gradient on a language model, for every combination of ``users``, ``epsilons`` and ``seeds``.

    ``nonprivate`` adds one run without noise for each number of users. The fields of the schedule are those of
    ``dptune.policy.language.schedule.Bandit``. Under private ``telemetry`` no canary is planted and nothing is
    attacked, because the prompts of canaries are private records too.

    Attributes:
        users: numbers K of prompts an update to compare.
        epsilons: budgets to compare.
        nonprivate: whether one run without noise is made for each number of users.
        seeds: seeds of initial adapters and samples; public.
        delta: delta of every epsilon.
        updates: number of releases.
        prompt_tokens: length to which every prompt is cut or padded.
        new_tokens: largest number of tokens of a continuation.
        rank, alpha: rank and alpha of the LoRA adapters.
        kl_weight: weight of the mean log-ratio to the base in the reward.
        learning_rate: learning rate of a user's own Adam steps.
        epochs: number of a user's own steps, each on the whole continuation.
        radius: clip radius of a user's update; None takes that of the trust region.
        trust, miss: the noisy step leaves ||step||^2 / 2 <= trust with a probability of ``miss`` at most.
        server_step: factor that multiplies the released mean.
        prompt_weight: weight of the likelihood of the user's own prompt in the loss: makes the model memorise, for
            audits.
        evaluate_every: updates between points of the curve.
        baseline_prompts: number of public prompts whose mean reward is the baseline.
        held_out_prompts: number of public prompts that the reward is measured on.
        canaries: number of secrets that fair coins plant in users' prompts: 12 or more, or 0.
        candidates: number of secrets never planted, to rank each planted one against.
        confidence: confidence of each lower bound.
        false_alarms: chance that a sound run is accused.
        telemetry: "private" plants no canary and attacks nothing.
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
    canaries: FewOrZero = 256
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
    """Make settings from ``NAME=VALUE`` texts, whose values are YAML; a single value stands for a list of one.

    Raises: ConfigError naming what is unknown or out of range.
    """
    values = load_assignments(options)
    for name in ("users", "epsilons", "seeds"):
        if name in values and not isinstance(values[name], list):
            values[name] = [values[name]]
    try:
        return Rlhf.model_validate(values)
    except ValidationError as error:
        raise refusal(error, "policy.rlhf", values) from None
