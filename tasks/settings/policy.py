"""The section `policy`: studies of private reinforcement learning, each a set of runs to compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dptune.core.bounds import CountOrZero, Delta, Seed
from dptune.core.errors import ConfigError
from dptune.mechanisms.options import make_part
from dptune.policy.environments.schedule import PolicyTraining
from dptune.policy.method import Dppg, calibrated_method, check_accounting, method_of
from dptune.privacy.run_header import ACCOUNTINGS
from tasks.settings.library_section import LibrarySection
from tasks.settings.rlhf import Rlhf
from tasks.settings.strict import Name, StrictModel, combinations, distinct
from tasks.settings.tenants import Tenants

BASELINES = ("ppo", "a2c", "ucb_vi")
_METHOD, _TRAINING = ({item.name for item in fields(cls)} for cls in (Dppg, PolicyTraining))
_UCB_VI: tuple[str, ...] = ("bonus", "confidence")


class Study(StrictModel):
    """One environment and the runs on it.

    Attributes:
        environment: id of an environment of gymnasium, or of dptune.
        options: options of the environment's constructor.
        training: schedule that all runs share; fields of ``dptune.policy.environments.schedule.PolicyTraining``.
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
        rlhf: a language model that is rewarded for words; None leaves it out.
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


def make_training(options: Mapping[str, Any]) -> PolicyTraining:
    """Make the schedule of a run. Raises: ConfigError naming an option that is unknown or out of range."""
    for option in options:
        if option not in _TRAINING:
            raise ConfigError(option, "is not an option of a run", fix=f"use one of {', '.join(sorted(_TRAINING))}")
    made: PolicyTraining = make_part(PolicyTraining, dict(options))
    return made
