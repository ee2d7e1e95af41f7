"""Additive noise: a base for noises that are added to every coordinate alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dptune.privacy.accounting.laplace_mixtures import InverseScale

if TYPE_CHECKING:
    from dptune.mechanisms.interfaces import CorrelatedNoise


class AdditiveNoise:
    """Defaults for a noise that no theorem covers, so that no epsilon is certified for it.

    Example:
        >>> from dptune.mechanisms.interfaces import AdditiveNoise
        >>> from dptune.privacy.release import UNBOUNDED
        >>> class MyNoise(AdditiveNoise):
        ...     pass  # no theorem covers it, so that its certified epsilon is infinite
        >>> MyNoise().family in UNBOUNDED
        True
    """

    published_accountant: ClassVar[str] = "gdp_clt"
    fixed_by: ClassVar[tuple[str, ...]] = ()
    own_scale: ClassVar[bool] = False

    @property
    def family(self) -> str:
        """The family "unproven"; noise that a known theorem prices names its own family instead."""
        return "unproven"

    @property
    def dimension(self) -> int:
        """Returns 0: no published accountant needs the dimension."""
        return 0

    @property
    def claims(self) -> tuple[tuple[str, float], ...]:
        """Returns no claims: no published accountant reads any."""
        return ()

    @property
    def correlated(self) -> CorrelatedNoise | None:
        """Returns None: every row's noise is drawn by itself."""
        return None

    def law(self, noise_multiplier: float) -> InverseScale | None:
        """Returns None: the noise is no Laplace mixture."""
        return None
