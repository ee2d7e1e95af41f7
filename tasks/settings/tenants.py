"""The section `policy.tenants`: a hyper-policy that is trained across simulated tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dptune.bounds import Chance, CountOrZero, Delta, Epsilon, Few, LearningRate, Positive, Seed
from dptune.errors import ConfigError
from dptune.invalid import problem_of
from tasks.settings.strict import StrictModel
from tasks.settings.strict_yaml import load_assignments

Size = Literal["small", "large"]


class Tenants(StrictModel):
    """Simulated tenants, the training over them, and the ablation on new ones.

    The defaults show in under a minute that everything works; ``LARGE`` is for results.

    Attributes:
        cohort_seed: seed of the synthetic cohort; public.
        records_per_tenant: mean number of records of a tenant; a quarter of them is held out.
        tenants: K, number of tenants of an update; each tenant takes part in one update.
        updates: number of releases. More of them cost no privacy, but need more tenants.
        runs: number of runs of each tenant, which differ in exploration; a run's baseline is the mean of the others.
        noise_multiplier: z on the sum of the tenants' updates, for a tenant that is zeroed; half of it for a record.
        trust, miss: the noisy step leaves ||step||^2 / 2 <= trust with a probability of miss at most; sets the radius.
        seed: seed of exploration; public.
        epsilon: certified budget of a run for one record, all that it inherits included.
        delta: delta of every epsilon.
        sample_rate, steps, fine_tuning_rate, warmup_steps, physical_batch_size, max_length: schedule of a fine-tuning
            run.
        interval, warmup: number of releases between actions, and before the first action.
        radius: starting clip radius of every pair.
        public_records: number of public records whose mean loss controllers follow.
        new_tenants: number of tenants in the ablation, none of which took part in the training.
        seeds: seeds of adapters and exploration in the ablation.
    """

    cohort_seed: Seed = 29
    records_per_tenant: Few = 64
    tenants: Few = 4
    updates: Few = 2
    runs: Annotated[Few, Field(ge=2)] = 2
    noise_multiplier: Positive = 4.0
    trust: Positive = 0.5
    miss: Chance = 0.1
    seed: Seed = 0
    epsilon: Epsilon = 8.0
    delta: Delta = 1e-5
    sample_rate: Annotated[float, Field(gt=0, le=1)] = 0.25
    steps: Few = 12
    fine_tuning_rate: LearningRate = 0.01
    warmup_steps: CountOrZero = 4
    physical_batch_size: Few = 16
    max_length: Annotated[Few, Field(ge=3)] = 96
    interval: Few = 3
    warmup: CountOrZero = 2
    radius: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    public_records: Annotated[Few, Field(ge=2)] = 64
    new_tenants: Few = 1
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] = (0,)

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


LARGE = Tenants(tenants=32, updates=3, steps=24, interval=4, new_tenants=8, seeds=(0, 1))


def settings_from(size: Size, changes: Sequence[str]) -> Tenants:
    """The settings of a size, with changes as ``NAME=VALUE``.

    Raises: ConfigError naming what is unknown or out of range.
    """
    values = (LARGE if size == "large" else Tenants()).model_dump() | load_assignments(changes)
    try:
        return Tenants.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(map(str, first["loc"])), problem_of(first), fix="correct it") from None
