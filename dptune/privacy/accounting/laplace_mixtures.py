"""Laplace noise whose inverse scale is itself random: the law of one coordinate, and figures of its privacy.

    z | u ~ Laplace(0, 1 / u),    u = constant + sum of independent Gamma, exponential and uniform parts >= 0.

PLRV-O (doi 10.1145/3719027.3765151) has the Gamma part alone, LMO-DP (arXiv 2405.18776) all three, plain Laplace
noise the constant alone. Everything follows from the moment generating function M(t) = E exp(u t): the tail is
P(|z| > x) = M(-x), the density M'(-|x|) / 2. All of it is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError

Array = NDArray[np.float64]
_LARGEST_EXPONENT = 100.0


@dataclass(frozen=True)
class InverseScale:
    """The law of the inverse scale u, a constant plus independent Gamma, exponential and uniform parts.

    Attributes:
        constant: the constant part; alone, the noise is Laplace with scale 1 / constant.
        gamma: (shape k, scale theta) of the Gamma part, its weight included in theta; (0, 0) for none.
        exponential: mean of the exponential part, its weight included (weight / rate); 0 for none.
        uniform: (low, high) of the uniform part, its weight included; (0, 0) for none.
    """

    constant: float = 0.0
    gamma: tuple[float, float] = (0.0, 0.0)
    exponential: float = 0.0
    uniform: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        numbers = (self.constant, *self.gamma, self.exponential, *self.uniform)
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ConfigError("noise", f"{self} has a negative or infinite part", fix="use numbers of 0 or more")
        if (self.gamma[0] > 0) != (self.gamma[1] > 0):
            raise ConfigError("noise", f"shape and scale {self.gamma}: one is 0", fix="use two positive numbers")
        if self.uniform != (0.0, 0.0) and self.uniform[1] <= self.uniform[0]:
            raise ConfigError("noise", f"the uniform part {self.uniform} is empty (b <= a)", fix="use b above a")
        if self.mean <= 0:
            raise ConfigError("noise", "no part of the inverse scale is positive", fix="give one a positive weight")
        moderate = max(numbers) < 1e75  # products of two of the numbers stay within the range of floats
        if not (moderate and 0 < self.second_moment < math.inf and 0 < self.score_bound < math.inf):
            raise ConfigError("noise", f"{self} has moments beyond the range of numbers", fix="use common sizes")

    @property
    def mean(self) -> float:
        """The mean E u, which is twice the density of z at 0."""
        return self.constant + math.prod(self.gamma) + self.exponential + sum(self.uniform) / 2

    @property
    def second_moment(self) -> float:
        """The second moment E u^2."""
        width = self.uniform[1] - self.uniform[0]
        return self.mean**2 + math.prod(self.gamma) * self.gamma[1] + self.exponential**2 + width**2 / 12

    @property
    def score_bound(self) -> float:
        """The largest |(log f)'|, s0 = E u^2 / E u: a shift of one coordinate by x is (s0 |x|, 0)-DP.

        (log f is convex on each half line, so its slope is steepest at 0.) For PLRV-O it is (k + 1) theta.
        """
        return self.second_moment / self.mean

    @property
    def largest_mgf_argument(self) -> float:
        """The supremum of the t at which M(t) is finite."""
        return min(1 / scale if scale else math.inf for scale in (self.gamma[1], self.exponential))

    @property
    def density_exponent_at_zero(self) -> float:
        """The power of h by which P(u < h) falls as h -> 0; E u^-p, and with it E |z|^p, is finite for p below it."""
        if self.constant or self.uniform[0]:
            return math.inf
        return self.gamma[0] + (1.0 if self.exponential else 0.0) + (1.0 if self.uniform[1] else 0.0)

    @property
    def is_constant(self) -> bool:
        """Whether the noise is plain Laplace noise."""
        return self.mean == self.constant

    @property
    def is_gamma(self) -> bool:
        """Whether the Gamma part is the only one."""
        return any(self.gamma) and not (self.constant or self.exponential or any(self.uniform))

    def scaled(self, factor: float) -> InverseScale:
        """The law of ``factor`` times u, whose noise is divided by ``factor``."""
        return replace(
            self,
            constant=factor * self.constant,
            gamma=(self.gamma[0], factor * self.gamma[1]),
            exponential=factor * self.exponential,
            uniform=(factor * self.uniform[0], factor * self.uniform[1]),
        )

    def rounded_up(self, step: float) -> InverseScale:
        """A law under which u is stochastically at least as large, its numbers rounded up to a grid.

        ``step`` is the grid's, in the logarithm. A cost that grows with u is at least as large under the new law.
        """
        constant, (low, high) = rounded_up(self.constant, step), (rounded_up(end, step) for end in self.uniform)
        if low == high:  # both ends were rounded to one number, which u cannot exceed
            constant, low, high = constant + high, 0.0, 0.0
        gamma = (rounded_up(self.gamma[0], step), rounded_up(self.gamma[1], step))
        return InverseScale(constant, gamma, rounded_up(self.exponential, step), (low, high))

    def log_mgf(self, t: Any) -> Array:
        """The log of the moment generating function, log M(t); infinity outside the domain."""
        t = np.asarray(t, dtype=np.float64)
        (k, theta), (low, high) = self.gamma, self.uniform
        inside = t < self.largest_mgf_argument
        t = np.where(inside, t, 0.0)
        total = self.constant * t - k * np.log1p(-theta * t) - np.log1p(-self.exponential * t)
        # The uniform part adds log((e^w - 1) / w), w = (high - low) t; factoring out the larger end avoids overflow.
        width = np.abs((high - low) * t)
        total = total + np.where(t > 0, high, low) * t + _log_phi(width)
        return np.where(inside, total, np.inf)

    def tilted(self, x: Any) -> tuple[Array, Array]:
        """Mean and variance of u under the law tilted by exp(-u x), x >= 0: first derivatives of log M at -x."""
        x = np.asarray(x, dtype=np.float64)
        (k, theta), (low, high) = self.gamma, self.uniform
        gamma = theta / (1 + theta * x)
        exponential = self.exponential / (1 + self.exponential * x)
        mean, variance = _uniform_tilt(high - low, x)
        return (
            self.constant + k * gamma + exponential + low + mean,
            k * gamma**2 + exponential**2 + variance,
        )

    def log_tail(self, x: Any) -> Array:
        """The log of the tail, log P(|z| > x), for x >= 0."""
        return self.log_mgf(-np.asarray(x, dtype=np.float64))

    def cdf(self, x: Any) -> Array:
        """The distribution function P(z <= x)."""
        x = np.asarray(x, dtype=np.float64)
        half = np.exp(self.log_tail(np.abs(x))) / 2
        return np.where(x < 0, half, 1 - half)

    def log_density(self, x: Any) -> Array:
        """The log of the density, log f(x) = log(M'(-|x|) / 2)."""
        x = np.abs(np.asarray(x, dtype=np.float64))
        return self.log_mgf(-x) + np.log(self.tilted(x)[0] / 2)

    def score(self, x: Any) -> Array:
        """The score -(log f)'(x) = E u^2 e^(-ux) / E u e^(-ux), for x > 0."""
        mean, variance = self.tilted(x)
        return mean + variance / mean

    @cached_property
    def mean_absolute(self) -> float:
        """The mean absolute noise E |z| = E 1 / u; infinite if u comes too near to 0."""
        return self._integral(lambda x: 1.0) if self.density_exponent_at_zero > 1 else math.inf

    @cached_property
    def variance(self) -> float:
        """The variance of the noise, 2 E 1 / u^2; may be infinite."""
        return self._integral(lambda x: 2 * x) if self.density_exponent_at_zero > 2 else math.inf

    @cached_property
    def fisher_information(self) -> float:
        """The mean squared score I: in high dimension an evenly spread shift of l2 norm x is x sqrt(I)-Gaussian DP."""
        if self.is_gamma:
            k, theta = self.gamma
            return (k + 1) ** 2 * theta**2 * k / (k + 2)
        return self._integral(lambda x: float(self.score(x) ** 2 * self.tilted(x)[0]))

    @cached_property
    def entropy(self) -> float:
        """The differential entropy of the noise on one coordinate, in nats; of a Gaussian it is log(2 pi e s^2) / 2."""
        # -E log f is what the tail adds up to: -log f(0) plus the integral of P(|z| > x) times the slope of -log f.
        return self._integral(lambda x: float(self.score(x))) - float(self.log_density(0.0))

    def _integral(self, weight: Callable[[float], float]) -> float:
        """The integral of P(|z| > x) weight(x) over x >= 0, computed in log x around the bend of the tail."""
        from scipy.integrate import quad

        unit = 1 / self.mean

        def integrand(log_x: float) -> float:
            x = unit * math.exp(log_x)
            return x * math.exp(float(self.log_tail(x))) * weight(x)

        value, _ = quad(integrand, -45.0, 80.0, points=[-5.0, 0.0, 2.0, 5.0, 12.0], limit=1000, epsabs=0, epsrel=1e-11)
        return float(value)


def rounded_up(number: float, step: float) -> float:
    """Round up to the next power of exp(step); 0 and numbers far beyond common sizes stay as they are."""
    if not (number and abs(exponent := math.log(number)) < _LARGEST_EXPONENT):
        return number
    return max(number, math.exp(math.ceil(exponent / step) * step))


def _log_phi(width: Array) -> Array:
    """Compute log((1 - e^-w) / w) for w >= 0."""
    safe = np.maximum(width, 1e-300)
    return np.where(width < 1e-12, -width / 2, np.log(-np.expm1(-safe)) - np.log(safe))


def _uniform_tilt(width: float, x: Array) -> tuple[Array, Array]:
    """Mean and variance of a uniform on [0, width] tilted by exp(-u x), x >= 0."""
    w = width * x
    near = w < 1e-2
    safe = np.where(near, 1.0, w)
    mean = np.where(near, 0.5 - w / 12 + w**3 / 720, 1 / safe - 1 / np.expm1(np.minimum(safe, 700.0)))
    ratio = 1 / (4 * np.sinh(np.minimum(safe, 700.0) / 2) ** 2)
    variance = np.where(near, 1 / 12 - w**2 / 240 + w**4 / 6048, 1 / safe**2 - ratio)
    return width * mean, width**2 * variance
