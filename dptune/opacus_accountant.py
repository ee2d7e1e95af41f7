"""dptune's tight accountant for Opacus users: ``import dptune.opacus_accountant`` registers "dptune_pld".

>>> from opacus.accountants import create_accountant
>>> import dptune.opacus_accountant
>>> accountant = create_accountant("dptune_pld")
>>> accountant.step(noise_multiplier=1.0, sample_rate=0.01)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from opacus.accountants import IAccountant, register_accountant

from dptune.privacy.accountants import pld_epsilon
from dptune.privacy.release import Release


class PLDAccountant(IAccountant):
    """Tight epsilon of Poisson-subsampled Gaussian steps whose (q, z) were fixed before the run.

    ``history`` is run-length encoded as Opacus' own accountants do: (noise_multiplier, sample_rate, steps).

    Example:
        >>> from dptune.opacus_accountant import PLDAccountant
        >>> accountant = PLDAccountant()
        >>> for _ in range(1000):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> round(accountant.get_epsilon(delta=1e-5), 3)
        1.829
    """

    def __init__(self) -> None:
        self.history: list[tuple[float, float, int]] = []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count one step. Raises ConfigError for values out of range."""
        Release(sample_rate, noise_multiplier)
        if self.history and self.history[-1][:2] == (noise_multiplier, sample_rate):
            self.history[-1] = (noise_multiplier, sample_rate, self.history[-1][2] + 1)
        else:
            self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float, **_: Any) -> float:
        """Pessimistic connect-the-dots PLD epsilon of all steps so far."""
        composition: Counter[Release] = Counter()
        for noise_multiplier, sample_rate, steps in self.history:
            composition[Release(sample_rate, noise_multiplier)] += steps
        return pld_epsilon(composition, delta)

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    @classmethod
    def mechanism(cls) -> str:
        """The name under which Opacus knows it."""
        return "dptune_pld"


register_accountant(PLDAccountant.mechanism(), PLDAccountant, force=True)
