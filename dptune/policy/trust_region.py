"""Clip radii that keep a noisy update inside a trust region, and the moments of such updates.

An update moves the policy by ``step_size * (g + noise)``, where ||g|| <= ``radius`` and the noise is normal with a
standard deviation of ``noise_multiplier * radius / users`` in every coordinate. Radii depend on public figures alone
and cost no privacy, but for ``kl_radius``, whose Fisher matrix must be public. Source: propositions 4.4 to 4.7 of the
paper, which has one user an update; for K users its z is z / K in the noise (spec, section 2.3 f).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import chi2, ncx2

from dptune.errors import ConfigError

_HARDLY_ANY = 1e-3


@dataclass(frozen=True)
class Update:
    """The public figures of an update.

    Attributes:
        step_size: eta, the factor that multiplies the noisy mean.
        noise_multiplier: z, standard deviation of the noise on the *sum* over the clip radius.
        dimension: d, parameters of the policy.
        users: K, users an update.
    """

    step_size: float
    noise_multiplier: float
    dimension: int
    users: int = 1

    def __post_init__(self) -> None:
        for name in ("step_size", "dimension", "users"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(name, f"{value} is not positive", fix="use a positive number")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigError("noise_multiplier", f"{self.noise_multiplier} is negative", fix="use 0 or more")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on the mean, over the clip radius."""
        return self.noise_multiplier / self.users


def l2_radius(update: Update, trust: float, miss: float) -> float:
    """The largest radius with P[||step||^2 / 2 <= ``trust``] >= 1 - ``miss``, by the exact law (proposition 4.4).

    Tight where a gradient is clipped: ||step||^2 / (eta z S / K)^2 is noncentral chi-square with d degrees of freedom
    and a noncentrality of (K / z)^2 at most.
    """
    _check(trust, miss)
    if update.noise < _HARDLY_ANY:  # the quantile is beyond what can be computed; |g + noise| <= |g| + |noise| is not
        spread = update.noise * math.sqrt(float(chi2.ppf(1 - miss, update.dimension)))
        return math.sqrt(2 * trust) / (update.step_size * (1 + spread))
    quantile = float(ncx2.ppf(1 - miss, update.dimension, update.noise**-2))
    return math.sqrt(2 * trust / quantile) / (update.step_size * update.noise)


def kl_radius(
    update: Update, trust: float, miss: float, *, largest: float, trace: float, as_printed: bool = False
) -> float:
    """A radius with P[step^T F step / 2 <= ``trust``] >= 1 - ``miss`` (proposition 4.7, by Markov's inequality).

    Args:
        largest, trace: largest eigenvalue and trace of the Fisher matrix F at the old policy. Must be public.
        as_printed: without the factor 1/2, which the proposition's last line forgets: smaller by sqrt(2), hence safe.
    """
    _check(trust, miss)
    for name, value in (("largest", largest), ("trace", trace)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(name, f"{value} is not positive", fix="add a regulariser to the diagonal of F")
    factor = 1 if as_printed else 2
    return math.sqrt(factor * trust * miss / (largest + update.noise**2 * trace)) / update.step_size


def _check(trust: float, miss: float) -> None:
    if not (math.isfinite(trust) and trust > 0):
        raise ConfigError("trust", f"{trust} is not positive", fix="use the alpha of the trust region")
    if not 0 < miss < 1:
        raise ConfigError("miss", f"{miss} is not in (0, 1)", fix="use the chance of leaving the region, 0.1 say")
