"""The section `policy.tenants`: a hyper-policy that is trained across simulated tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import ValidationError

from dptune.core.bounds import CountOrZero, Delta, Epsilon, Few, LearningRate, Positive, Rows, Seed
from dptune.core.settings import StepSettings
from dptune.policy.tenants.schedule import MetaTraining
from tasks.settings.library_section import read_section
from tasks.settings.strict import STRICT
from tasks.settings.strict_yaml import load_assignments, refusal


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


def settings_of(options: Sequence[str]) -> Tenants:
    """Make settings from ``NAME=VALUE`` texts, whose values are YAML.

    Raises: ConfigError naming what is unknown or out of range.
    """
    values = load_assignments(options)
    try:
        return read_section(Tenants, values)
    except ValidationError as error:
        raise refusal(error, "policy.tenants", values) from None
