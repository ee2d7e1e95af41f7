"""The section `policy`: studies of private reinforcement learning, each a set of runs to compare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal
from warnings import warn

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, Field, ValidationError, model_validator

from dptune.core.declarations import (
    Chance,
    CountOrZero,
    Delta,
    Epsilon,
    Few,
    FewOrZero,
    LearningRate,
    Positive,
    Rows,
    Seed,
)
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora, StepSettings
from dptune.mechanisms.options import make_part
from dptune.policy.method import Dppg, calibrated_method, check_accounting, method_of
from dptune.policy.schedules import BanditSettings, MetaTraining, PolicyTraining
from dptune.privacy.run_header import ACCOUNTINGS
from tasks.settings.experiment import Model
from tasks.settings.learned_reward import LearnedRewardSettings
from tasks.settings.strict import (
    STRICT,
    LibrarySection,
    Name,
    StrictModel,
    combinations,
    distinct,
    load_assignments,
    read_section,
    refusal,
)


@dataclass(frozen=True, kw_only=True)
class Tenants(MetaTraining, StepSettings):
    """Simulated tenants, the training over them, and the ablation on new ones.

    Each tenant takes part in one update. The defaults show in under a minute that everything works;
    ``profiles/policy.yaml`` is for results.

    Attributes:
        cohort_seed: seed of the synthetic cohort; public.
        records_per_tenant: mean number of records of a tenant; a quarter of them is held out.
        noise_multiplier: z on the sum of the tenants' updates, for a tenant that is zeroed; half of it for a record.
        epsilon: certified budget of a run for one record, all that it inherits included.
        delta: delta of every epsilon.
        sample_rate: probability with which each record of a tenant enters each batch.
        steps: releases of a run.
        max_length: width of every batch in tokens.
        interval, warmup: number of releases between actions, and before the first action.
        radius: starting clip radius of every pair.
        public_records: number of public records whose mean loss controllers follow.
        new_tenants: number of tenants in the ablation, none of which took part in the training.
        seeds: seeds of adapters and exploration in the ablation.
    """

    __pydantic_config__ = STRICT

    cohort_seed: Seed = 29
    records_per_tenant: Few = 64
    tenants: Few = 4
    updates: Few = 2
    noise_multiplier: Positive = 4.0
    epsilon: Epsilon = 8.0
    delta: Delta = 1e-5
    sample_rate: Annotated[float, Gt(0), Le(1)] = 0.25
    steps: Few = 12
    learning_rate: LearningRate = 0.01
    warmup_steps: CountOrZero = 4
    max_length: Annotated[Few, Ge(3)] = 96
    interval: Few = 3
    warmup: CountOrZero = 2
    radius: Annotated[float, Gt(0), Le(1e6)] = 0.1
    public_records: Annotated[Rows, Ge(2)] = 64
    new_tenants: Few = 1
    seeds: Annotated[tuple[Seed, ...], MinLen(1)] = (0,)

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``rldp`` for all agents. SAC's batch is 4, because so few actions make few transitions."""
        return {
            "pair_radius": self.radius,
            "radius_cap": max(1.0, self.radius),
            "interval": self.interval,
            "warmup": self.warmup,
            "batch_size": 4,
        }


def tenants_of(options: Sequence[str]) -> Tenants:
    """Make settings from ``NAME=VALUE`` texts, whose values are YAML.

    Raises: ConfigError naming what is unknown or out of range.
    """
    values = load_assignments(options)
    try:
        return read_section(Tenants, values)
    except ValidationError as error:
        raise refusal(error, "policy.tenants", values) from None


_FEWEST_CANARIES = 12
_LORA = Lora(rank=4, alpha=8, dropout=0.0)


@dataclass(frozen=True, kw_only=True)
class Rlhf(BanditSettings):
    """Policy gradient on a language model, for every combination of ``users``, ``epsilons`` and ``seeds``.

    ``nonprivate`` adds one run without noise for each number of users. Under private ``telemetry`` no canary is planted
    and nothing is attacked, because the prompts of canaries are private records too.

    Attributes:
        model: the policy's base model; left out, the pipeline's own public model. With one of your own, the public
            prompts are the experiment's public records.
        reward: a learned reward; left out, a public lexicon for narratives of hospital encounters.
        codes: put a random code into every prompt, which the attacks on canaries look for; false needs canaries: 0.
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

    model: Model | None = None
    reward: LearnedRewardSettings | None = None
    codes: bool = True
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
        if self.canaries and not self.codes:
            raise ConfigError("codes", "canaries are known by their codes", fix="use true, or canaries: 0")
        if self.lora.dropout:
            problem = "dropout makes the probability ratio of unchanged adapters differ from 1"
            raise ConfigError("lora", problem, fix="use dropout: 0")


def rlhf_of(options: Iterable[str]) -> Rlhf:
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


BASELINES = ("ppo", "a2c", "ucb_vi")
_METHOD, _TRAINING = ({item.name for item in fields(cls)} for cls in (Dppg, PolicyTraining))
_UCB_VI: tuple[str, ...] = ("bonus", "confidence")


class Study(StrictModel):
    """One environment and the runs on it.

    Attributes:
        environment: id of an environment of gymnasium, or of dptune.
        options: options of the environment's constructor.
        training: schedule that all runs share; fields of ``dptune.policy.schedules.PolicyTraining``.
        runs: options of each run by its label: noise_multiplier or epsilon, critic, accounting, and the entries of the
            schedule that differ; or ``baseline``. A list under ``sweep`` makes one run for each of its values.
    """

    environment: str
    options: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    runs: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]


class PolicySettings(StrictModel):
    """Studies, their seeds and delta, and two experiments of their own: ``rlhf`` and ``tenants``.

    Attributes:
        name: name of the experiment in MLflow.
        delta: delta of every epsilon.
        seeds: seeds of environments and initial policies; public.
        processes: number of runs side by side.
        audit_trials: number of trials of the white-box attack on the mean update: 500 or more, or 0.
        studies: environments by a name of yours, each with the runs to compare on it.
        rlhf: a language model that is rewarded for what it says; None leaves it out.
        tenants: a hyper-policy that is learned across tenants; None leaves it out.
    """

    name: Name
    delta: Delta
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1), AfterValidator(distinct)]
    processes: Annotated[int, Field(ge=1, le=1024)]
    audit_trials: CountOrZero
    studies: dict[Name, Study]
    rlhf: Annotated[Rlhf, LibrarySection()] | None = None
    tenants: Annotated[Tenants, LibrarySection()] | None = None

    @model_validator(mode="after")
    def _runs(self) -> PolicySettings:
        for name, study in self.studies.items():
            try:
                expanded(study, self.delta)
            except ConfigError as error:
                raise ValueError(f"studies.{name}: {error}") from None
        if 0 < self.audit_trials < 500:
            raise ValueError(f"audit_trials: {self.audit_trials} is too few: use 0, or 500 or more")
        return self


@dataclass(frozen=True)
class StudyRun:
    """A run of a study, which is done once for each seed.

    Attributes:
        label: name of the run in logs and reports.
        group: label of the entry that the run comes from; runs of one sweep share it.
        kind: dppg, or the name of a baseline.
        method: settings that the run's privacy depends on; None for a baseline without privacy.
        accounting: the epsilon that the noise is calibrated to, "certified" or "published".
        training: schedule of the run.
        extra: options of UCB-VI by name; empty for other kinds.
    """

    label: str
    group: str
    kind: Literal["dppg", "ppo", "a2c", "ucb_vi"]
    method: Dppg | None
    accounting: str
    training: PolicyTraining
    extra: Mapping[str, float]


def expanded(study: Study, delta: float) -> list[StudyRun]:
    """All runs of a study, with one for each value of a sweep. Raises: ConfigError naming run and option."""
    runs = []
    for group, entry in study.runs.items():
        for label, options in swept(group, entry):
            try:
                runs.append(_run(label, group, options, study, delta))
            except ConfigError as error:
                raise ConfigError(f"runs.{label}.{error.field}", error.problem, fix=error.fix) from None
    return runs


def swept(name: str, entry: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Labels and options of the runs that an entry stands for: one for each combination of the lists in ``sweep``.

    Raises: ConfigError if ``sweep`` is no table of lists.
    """
    try:
        found = combinations(entry.get("sweep", {}))
    except ValueError as error:
        raise ConfigError(f"runs.{name}.sweep", str(error), fix="write {option: [values]}") from None
    fixed = {key: value for key, value in entry.items() if key != "sweep"}
    versions = []
    for chosen in found:
        label = ".".join([name, *(f"{_SHORT.get(key, key)}{value}" for key, value in chosen.items())])
        versions.append((label, fixed | chosen))
    return versions


_SHORT = {"noise_multiplier": "z", "users": "K", "epsilon": "eps"}


def _run(label: str, group: str, options: dict[str, Any], study: Study, delta: float) -> StudyRun:
    options = dict(options)
    kind = options.pop("baseline", "dppg")
    if kind not in ("dppg", *BASELINES):
        raise ConfigError("baseline", f"unknown {kind!r}", fix=f"use one of {', '.join(BASELINES)}")
    accounting = options.pop("accounting", "certified")
    if accounting not in ACCOUNTINGS:
        raise ConfigError("accounting", f"unknown {accounting!r}", fix=f"use one of {', '.join(ACCOUNTINGS)}")
    extra: dict[str, float] = {
        key: _number(key, options.pop(key)) for key in _UCB_VI if kind == "ucb_vi" and key in options
    }
    private = {key: options.pop(key) for key in (*_METHOD, "epsilon") if key in options}
    training = make_training({**study.training, **options})
    if kind in ("ppo", "a2c") and private:
        raise ConfigError(sorted(private)[0], f"{kind} is not private", fix="leave it out")
    if kind == "ucb_vi":
        private = {"critic": "none", **(private or {"noise_multiplier": 0.0})}
        accounting = "published" if not private.get("noise_multiplier", 1.0) else accounting
    method = _method(private, delta, accounting) if kind in ("dppg", "ucb_vi") else None
    return StudyRun(label, group, kind, method, accounting, training, extra)


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(name, f"{value!r} is not a number", fix="write a number")
    return number


def _method(options: dict[str, Any], delta: float, accounting: str) -> Dppg:
    epsilon = options.pop("epsilon", None)
    if epsilon is not None and "noise_multiplier" in options:
        raise ConfigError("epsilon", "is given beside noise_multiplier", fix="give one of the two")
    method = (
        method_of(options)
        if epsilon is None
        else calibrated_method(options, _number("epsilon", epsilon), delta, accounting)
    )
    check_accounting(method, delta, accounting)
    return method


def _without_as_printed(options: dict[str, Any]) -> dict[str, Any]:
    """The same schedule without an option of earlier versions, which halved the trust region of algorithm kl."""
    warn("as_printed is gone: write half of trust in place of as_printed: true", FutureWarning, stacklevel=2)
    if options.pop("as_printed") is True and options.get("algorithm") == "kl":
        options["trust"] = options.get("trust", PolicyTraining.trust) / 2
    return options


def make_training(options: Mapping[str, Any]) -> PolicyTraining:
    """Make the schedule of a run. Raises: ConfigError naming an option that is unknown or out of range."""
    if "as_printed" in options:
        options = _without_as_printed(dict(options))
    for option in options:
        if option not in _TRAINING:
            raise ConfigError(option, "is not an option of a run", fix=f"use one of {', '.join(sorted(_TRAINING))}")
    made: PolicyTraining = make_part(PolicyTraining, dict(options))
    return made
