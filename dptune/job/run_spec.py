"""Job: plan, mechanism, ledger header and specification of one run, made alike for every door.

``tune``, ``suggest``, the candidates of a search, rehearsals and the cells of a grid call these functions. What differs
is where records come from, and whether the schedule is given or chosen (``defaults``).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dptune.core.declarations import part_of
from dptune.core.errors import ConfigError
from dptune.core.settings import ScheduleSettings
from dptune.job.base_model import Base
from dptune.job.settings import JobSettings
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated, Schedule, calibrated, fitted, planned
from dptune.mechanisms.registry import build, takes_noise
from dptune.privacy.entropy import Entropy
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens
from dptune.training.models.own_weights import start_training
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, TrainingPlan, header_of


def training_plan(settings: ScheduleSettings, chosen: Any = None, **rest: Any) -> TrainingPlan:
    """The public schedule of a run.

    Args:
        chosen: an object with some of the plan's fields, which go before those of ``settings``.
        rest: further fields of the plan, such as ``sample_rate`` and ``steps``.
    """
    names = [item.name for item in fields(TrainingPlan) if hasattr(chosen, item.name)]
    return part_of(TrainingPlan, settings, **{name: getattr(chosen, name) for name in names}, **rest)


def mechanism_of(
    settings: JobSettings, options: dict[str, Any], priced: Schedule, accounting: str = "certified"
) -> Calibrated:
    """The mechanism with the least noise that keeps the schedule within ``settings.epsilon``.

    Without a budget, with a noise that is given, or for a mechanism without noise, the options' own.

    Args:
        options: the mechanism's own, completed for the model by ``registry.of_model``.

    Raises: ConfigError for a budget that no noise meets.
    """
    name = settings.mechanism
    if settings.epsilon is None or "noise_multiplier" in options or not takes_noise(name, options):
        return Calibrated(fitted(build(name, options), priced))
    return calibrated(
        lambda noise: build(name, options | {"noise_multiplier": noise}), settings.epsilon, priced, accounting
    )


def job_header(
    settings: JobSettings,
    ready: Calibrated,
    units: PrivacyUnits,
    entropy: Entropy,
    priced: Schedule,
    accounting: str = "certified",
) -> RunHeader:
    """The first line of the run's ledger.

    Raises: ConfigError if the run would leak what private telemetry promises to keep.
    """
    mechanism = ready.mechanism
    header = header_of(
        mechanism,
        units,
        entropy,
        delta=priced.delta,
        epsilon=settings.epsilon,
        accounting=accounting,
        data=settings.called,
        telemetry=settings.telemetry,
        renyi_filter=ready.renyi_filter,
        train=settings.trained.said,
    )
    if settings.telemetry == "private" and (leaks := header.leaks_of(planned(mechanism, priced))):
        problem = f"private cannot hold for {settings.mechanism}: {'; '.join(leaks)}"
        raise ConfigError("telemetry", problem, fix="leave that mechanism out, or use research")
    return header


def job_spec(
    settings: JobSettings,
    base: Base,
    weights: Any,
    tokens: Tokens,
    units: PrivacyUnits,
    mechanism: Mechanism,
    plan: TrainingPlan,
    header: RunHeader,
    public: Tokens | None,
) -> RunSpec:
    """The specification of a run on these weights, with new adapters on them, or some of them made trainable.

    Raises: ConfigError as ``start_training``.
    """
    model = start_training(weights, settings.trained, settings.lora, settings.seed, base.head)
    return RunSpec(model, tokens, units, mechanism, plan, header, public=public)
