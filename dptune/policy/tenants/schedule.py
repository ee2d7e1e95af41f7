"""Public schedule of training a hyper-policy over tenants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from dptune.core.declarations import Chance, Few, Positive, Seed
from dptune.core.errors import ConfigError
from dptune.policy.trust_region import Update, l2_radius


@dataclass(frozen=True, kw_only=True)
class MetaTraining:
    """Public schedule of training a hyper-policy over tenants.

    Attributes:
        tenants: K, number of tenants in each update.
        updates: number of updates, each of which is one release; they need ``tenants * updates`` tenants.
        runs: number of runs of each tenant, which differ in exploration only; a run's baseline is the others' mean.
        trust, miss: a noisy step leaves the region ||step||^2 / 2 <= ``trust`` with probability ``miss`` at most.
        seed: seed of exploration, adapters and the runs' own noise; public.

    Raises: ConfigError naming the setting that is out of range.
    """

    tenants: Few = 32
    updates: Few = 4
    runs: Annotated[Few, Ge(2)] = 2
    trust: Positive = 0.5
    miss: Chance = 0.1
    seed: Seed = 0

    def __post_init__(self) -> None:
        for name in ("tenants", "updates"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        if self.runs < 2:
            raise ConfigError("runs", f"{self.runs} leaves a run without a baseline", fix="use 2 or more")

    def clip_radius(self, noise_multiplier: float, dimension: int) -> float:
        """Clip radius S of a tenant's update (proposition 4.4).

        Args:
            dimension: number of trained parameters.
        """
        return l2_radius(Update(1.0, noise_multiplier, dimension, self.tenants), self.trust, self.miss)
