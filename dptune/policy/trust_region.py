"""Clip radii that keep a noisy update inside a trust region.

An update moves the policy by ``step_size * (g + noise)``, where ||g|| <= ``radius`` and the noise is normal with a
standard deviation of ``noise_multiplier * radius / users`` in every coordinate. The radii cost no privacy: they depend
on public figures alone, if the Fisher matrix that ``kl_radius`` needs is a public one. Source: propositions 4.4 to 4.7
of Rio, Barlier and Colin 2025, who have one user in each update; for K users their z becomes z / K, because the mean
divides the noise by K and the clip radius stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import chi2, ncx2

from dptune.core.errors import ConfigError

_LEAST_NOISE = 1e-3


@dataclass(frozen=True)
class Update:
    """Public figures of an update.

    Attributes:
        step_size: eta, factor that multiplies the noisy mean.
        noise_multiplier: z, standard deviation of the noise on the *sum*, in units of the clip radius.
        dimension: d, number of the policy's parameters.
        users: K, number of users in each update.
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
        """Standard deviation of the noise on the mean, in units of the clip radius."""
        return self.noise_multiplier / self.users


def l2_radius(update: Update, trust: float, miss: float) -> float:
    """The largest clip radius S with P[||step||^2 / 2 <= ``trust``] >= 1 - ``miss``, exactly (proposition 4.4).

    ||step||^2 / (eta z S / K)^2 is noncentral chi-square with d degrees of freedom and a noncentrality of at most
    (K / z)^2, which is reached when all users' gradients are equal and clipped.

    Args:
        trust: alpha, half the squared l2 norm that bounds the trust region.
        miss: beta, probability with which a step may leave the region.

    Raises: ConfigError for a ``trust`` that is not positive, or a ``miss`` outside (0, 1).
    """
    _check(trust, miss)
    if update.noise < _LEAST_NOISE:  # scipy cannot compute this quantile; use ||g + noise|| <= ||g|| + ||noise||
        spread = update.noise * math.sqrt(float(chi2.ppf(1 - miss, update.dimension)))
        return math.sqrt(2 * trust) / (update.step_size * (1 + spread))
    quantile = float(ncx2.ppf(1 - miss, update.dimension, update.noise**-2))
    return math.sqrt(2 * trust / quantile) / (update.step_size * update.noise)


def kl_radius(update: Update, trust: float, miss: float, *, largest: float, trace: float) -> float:
    """A clip radius with P[step^T F step / 2 <= ``trust``] >= 1 - ``miss`` (equation 7, by Markov's inequality).

    The last line of proposition 4.7 promises this of step^T F step, without the half. For that, halve ``trust``.

    Args:
        trust: alpha, bound on the KL divergence (to second order) that defines the trust region.
        miss: beta, probability with which a step may leave the region.
        largest, trace: largest eigenvalue and trace of the Fisher matrix F at the old policy. Must be public.

    Raises: ConfigError for figures out of range.
    """
    _check(trust, miss)
    for name, value in (("largest", largest), ("trace", trace)):
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(name, f"{value} is not positive", fix="add a regulariser to the diagonal of F")
    return math.sqrt(2 * trust * miss / (largest + update.noise**2 * trace)) / update.step_size


def _check(trust: float, miss: float) -> None:
    if not (math.isfinite(trust) and trust > 0):
        raise ConfigError("trust", f"{trust} is not positive", fix="use the alpha of the trust region")
    if not 0 < miss < 1:
        raise ConfigError("miss", f"{miss} is not in (0, 1)", fix="use the chance of leaving the region, 0.1 say")
