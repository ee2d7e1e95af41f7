"""Laplace noises, of a fixed or a random scale: plain Laplace, PLRV-O and LMO-DP.

Their ``noise_multiplier`` is 1 / score bound of the law on one coordinate, in units of the clip radius. The Gaussian
with this multiplier has the same zCDP, so accountants, clippers and controllers treat both alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.additive_noise import AdditiveNoise
from dptune.mechanisms.noises.gaussian import LEAST_NOISE, MOST_NOISE, draw_by_quantile, noisy_sums
from dptune.mechanisms.registry import mechanism, noise
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.published_accountants import LARGEST_MOMENT, MOST_MOMENTS
from dptune.privacy.entropy import LARGEST_LOG_TAIL, Entropy, uniform

if TYPE_CHECKING:
    import torch

_KNOTS = 1 << 16
_SHARPEST = 0.5
_PARTS = ("gamma", "exponential", "uniform")


class _LaplaceMixture(AdditiveNoise):
    """A base that draws the noise by its law. Subclasses define the law, as ``shape``."""

    noise_multiplier: float

    @property
    def shape(self) -> InverseScale:
        """The law of the inverse scale up to a factor; ``law`` scales it to a noise multiplier."""
        raise NotImplementedError

    def law(self, noise_multiplier: float) -> InverseScale:
        """The law of the inverse scale for a clip radius of 1."""
        return at_multiplier(self.shape, noise_multiplier)

    def deviation(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise for a clip radius of 1; where that is infinite, the mean absolute value."""
        law = self.law(noise_multiplier)
        return math.sqrt(law.variance) if math.isfinite(law.variance) else law.mean_absolute

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Add the noise in float64, round to a public grid (see ``gaussian.py``), then cast to float32."""
        law, device = self.law(noise_multiplier), sums[0].device
        spreads = [scale * law.mean_absolute for scale in scales]
        drawn = self._law_of_a_draw(law, entropy)  # once, also where coordinates get their noise piece by piece
        return noisy_sums(lambda count: laplace_mixture(drawn, entropy, count, device), sums, list(scales), spreads)

    def _law_of_a_draw(self, law: InverseScale, entropy: Entropy) -> InverseScale:
        """The law by which all coordinates of one release are drawn, each independently of the others."""
        return law


@noise("laplace")
@dataclass(frozen=True)
class Laplace(_LaplaceMixture):
    """Laplace noise of scale ``noise_multiplier * radius`` on every coordinate (Dwork et al. 2006).

    With ``clipper: l1`` a step that takes every record is (1 / noise_multiplier, 0)-DP, for ideal real-valued noise.
    Computed noise never exceeds 80 scales, which adds about 1e-35 to delta for each coordinate.

    Attributes:
        noise_multiplier: scale of the noise over the clip radius.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    published_accountant: ClassVar[str] = "pure"
    noise_multiplier: float
    family: str = field(default="laplace_mixture", init=False)

    def __post_init__(self) -> None:
        if not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE:
            problem = f"{self.noise_multiplier} is not in [{LEAST_NOISE:g}, {MOST_NOISE:g}], and must be positive"
            raise ConfigError("noise_multiplier", problem, fix="calibrate it")

    @property
    def shape(self) -> InverseScale:
        """The law of a constant inverse scale."""
        return InverseScale(constant=1.0)


mechanism(
    "laplace",
    clipper="l1",
    noise="laplace",
    clips="the whole gradient to one radius in l1",
    adds="Laplace noise, radius times multiplier: for few parameters, and then also at delta 0",
)


@noise("plrvo")
@dataclass(frozen=True)
class Plrvo(_LaplaceMixture):
    """Laplace noise whose inverse scale is Gamma distributed, a new one for every coordinate (PLRV-O, section 5.1).

    Attributes:
        k: shape of the Gamma distribution.
        theta: its scale, as published: for gradients clipped to ``max_grad_norm``. An alternative to
            ``noise_multiplier``.
        noise_multiplier: 1 / ((k + 1) theta max_grad_norm). An alternative to ``theta``.
        max_grad_norm: the clip radius that ``theta`` goes with.
        dimension: number of coordinates that the published accountant sums over, without which its epsilon is infinite;
            a run takes it from its model.
        moments: number of moments that the published accountant tries; the paper has about 1,000 (section 5.1). More
            of them lower the claim where it is small, and change no noise of a given theta and nothing certified.
        shared: one scale for all coordinates, as the paper's definition 4.6 says and its code does not. For study: no
            bound is proven.
        infinite_variance: allow k <= 2, whose noise has none.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    published_accountant: ClassVar[str] = "plrvo"
    fixed_by: ClassVar[tuple[str, ...]] = ("theta",)
    k: float = 40.0
    theta: float = 0.0
    noise_multiplier: float = 0.0
    max_grad_norm: float = 1.0
    dimension: int = 0
    moments: int = LARGEST_MOMENT
    shared: bool = False
    infinite_variance: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k > 1):
            raise ConfigError("k", f"{self.k} is not above 1: the noise has no mean", fix="use 3 or more")
        if self.k <= 2 and not self.infinite_variance:
            fix = "use 3 or more, or infinite_variance=true"
            raise ConfigError("k", f"{self.k} is not above 2: the noise has no variance", fix=fix)
        if not 1 <= self.moments <= MOST_MOMENTS:
            raise ConfigError("moments", f"{self.moments} is not in [1, {MOST_MOMENTS}]", fix="use 255, or 1000")
        if (self.theta != 0) == (self.noise_multiplier != 0):
            problem = "give exactly one of them: each follows from the other"
            raise ConfigError("theta, noise_multiplier", problem, fix="give theta, or let the noise be calibrated")
        if self.theta:
            object.__setattr__(self, "noise_multiplier", 1 / ((self.k + 1) * self._product))
        if not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE:
            problem = f"its noise multiplier {self.noise_multiplier} is not in [{LEAST_NOISE:g}, {MOST_NOISE:g}]"
            raise ConfigError("theta" if self.theta else "noise_multiplier", problem, fix="calibrate it")

    @property
    def _product(self) -> float:
        product = self.theta * self.max_grad_norm
        if not 0 < product < 1:
            problem = f"{product:.4g}, times max_grad_norm, is not in (0, 1): no moment of the privacy loss is finite"
            raise ConfigError("theta", problem, fix="use a smaller theta")
        return product

    @property
    def family(self) -> str:
        """The family "shared_laplace_mixture" if all coordinates share one scale, else "laplace_mixture"."""
        return "shared_laplace_mixture" if self.shared else "laplace_mixture"

    @property
    def shape(self) -> InverseScale:
        """The law of a Gamma distributed inverse scale."""
        return InverseScale(gamma=(self.k, 1.0))

    @property
    def claims(self) -> tuple[tuple[str, float], ...]:
        """The dimension and the number of moments, for the published accountant; nothing that is not known or usual."""
        known = (("dimension", self.dimension, 0), ("moments", self.moments, LARGEST_MOMENT))
        return tuple((name, float(value)) for name, value, usual in known if value != usual)

    def _law_of_a_draw(self, law: InverseScale, entropy: Entropy) -> InverseScale:
        if self.shared:
            return InverseScale(constant=_gamma_quantile(*law.gamma, float(uniform(entropy, 1)[0])))
        return law


mechanism(
    "plrvo",
    noise="plrvo",
    clips="the whole gradient to one radius",
    adds="Laplace noise with a random inverse scale, Gamma (PLRV-O, CCS 2025, whose own epsilon is no bound)",
)


@noise("lmo_dp")
@dataclass(frozen=True)
class LmoDp(_LaplaceMixture):
    """Laplace noise whose inverse scale is a weighted sum of a Gamma, an exponential and a uniform variable, new for
    every coordinate (LMO-DP, section 4.3).

    Attributes:
        preset: T0.3, T0.7, T2, T3 or T5: the parameters that the authors published for that epsilon of a step; none
            for other weights.
        gamma_weight: a1, weight of the Gamma part.
        gamma_shape: k of the Gamma part.
        gamma_scale: theta of the Gamma part.
        exponential_weight: a2, weight of the exponential part.
        exponential_rate: lambda, a rate: the mean is 1 / lambda.
        uniform_weight: a3, weight of the uniform part.
        uniform_low: a of the uniform part, 0 or more.
        uniform_high: b of the uniform part, above a.
        noise_multiplier: noise multiplier to which the weights are rescaled; 0 leaves them.
        infinite_variance: allow parameters whose noise has none.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    published_accountant: ClassVar[str] = "lmo_dp"
    own_scale: ClassVar[bool] = True
    preset: Literal["T0.3", "T0.7", "T2", "T3", "T5", "none"] = "T0.3"
    gamma_weight: float = 0.0
    gamma_shape: float = 1.0
    gamma_scale: float = 1.0
    exponential_weight: float = 0.0
    exponential_rate: float = 1.0
    uniform_weight: float = 0.0
    uniform_low: float = 0.0
    uniform_high: float = 1.0
    noise_multiplier: float = 0.0
    infinite_variance: bool = False
    family: str = field(default="laplace_mixture", init=False)

    def __post_init__(self) -> None:
        if self.noise_multiplier and not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE:
            problem = f"{self.noise_multiplier} is neither 0 nor in [{LEAST_NOISE:g}, {MOST_NOISE:g}]"
            raise ConfigError("noise_multiplier", problem, fix="calibrate it")
        _check_weights(self)
        shape = self.shape
        if shape.density_exponent_at_zero <= 1:
            problem = "the inverse scale comes so near to 0 that the noise has no mean"
            raise ConfigError("noise", problem, fix="give uniform_low and uniform_weight, or gamma_shape above 1")
        if not math.isfinite(shape.variance) and not self.infinite_variance:
            problem = "the inverse scale comes so near to 0 that the noise has no variance"
            raise ConfigError("noise", problem, fix="give uniform_low and uniform_weight, or infinite_variance=true")
        if not self.noise_multiplier:
            if shape.largest_mgf_argument <= 1:
                problem = "the moment generating function is infinite at 1, so equation 4 has no integer order"
                raise ConfigError("gamma_scale, exponential_rate", problem, fix="use less weight on them")
            object.__setattr__(self, "noise_multiplier", 1 / shape.score_bound)

    @property
    def shape(self) -> InverseScale:
        """The law of the weighted sum of the three parts."""
        if self.preset != "none":
            return PRESETS[self.preset]
        gamma = (self.gamma_shape, self.gamma_weight * self.gamma_scale) if self.gamma_weight else (0.0, 0.0)
        return InverseScale(
            gamma=gamma,
            exponential=self.exponential_weight / self.exponential_rate,
            uniform=(self.uniform_weight * self.uniform_low, self.uniform_weight * self.uniform_high),
        )

    @property
    def claims(self) -> tuple[tuple[str, float], ...]:
        """The step's epsilon as the paper states it, for its own parameters; nothing for others."""
        if self.preset == "none" or not math.isclose(self.noise_multiplier * self.shape.score_bound, 1, rel_tol=1e-12):
            return ()
        return (("step_epsilon", float(self.preset[1:])),)

    @property
    def _weights(self) -> dict[str, float]:
        names = ("gamma_weight", "exponential_weight", "uniform_weight")
        return {name: getattr(self, name) for name in names if getattr(self, name) != 0}


mechanism(
    "lmo_dp",
    noise="lmo_dp",
    clips="the whole gradient to one radius",
    adds="Laplace noise with a random inverse scale, Gamma + exponential + uniform (LMO-DP, "
    "arXiv 2405.18776, whose own epsilon is no bound)",
)


def _published_law(
    weights: tuple[float, float, float], theta: float, k: float, rate: float, uniform: tuple[float, float]
) -> InverseScale:
    a1, a2, a3 = weights
    return InverseScale(gamma=(k, a1 * theta), exponential=a2 / rate, uniform=(a3 * uniform[0], a3 * uniform[1]))


#: The authors' parameters, by the epsilon that they state for one step.
PRESETS = {
    "T0.3": _published_law((0.1, 0.1, 0.1), 0.5, 1, 5, (1, 2)),
    "T0.7": _published_law((0.1, 0.1, 0.1), 0.5, 1, 5, (5, 6)),
    "T2": _published_law((0.1, 0.1, 0.2), 1, 2, 5, (7, 8)),
    "T3": _published_law((0.1, 0.1, 0.9), 1, 2, 5, (2, 3)),
    "T5": _published_law((0.1, 0.9, 0.7), 7.5, 1, 1, (6, 7)),
}


@lru_cache(maxsize=256)
def at_multiplier(shape: InverseScale, noise_multiplier: float) -> InverseScale:
    """The law at this noise multiplier. Cached, so that its integrals are computed once a run and not once a step."""
    return shape.scaled(1 / (noise_multiplier * shape.score_bound))


def laplace_mixture(law: InverseScale, entropy: Entropy, count: int, device: torch.device) -> torch.Tensor:
    """Draw ``count`` float64 values by the inverse of the tail, finite for every word that the entropy may give."""
    import torch

    def quantile(signs: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        steepness = tail.mul_(2).log_().neg_()  # exponential, never negative: twice the tail is 1 at most
        if law.is_gamma:
            return steepness.mul_(1 / law.gamma[0]).expm1_().mul_(signs).mul_(1 / law.gamma[1])
        if law.is_constant:
            return steepness.mul_(signs).mul_(1 / law.constant)
        return _interpolate(table, steepness).mul_(signs)

    table = torch.empty(0) if law.is_gamma or law.is_constant else _tail_quantiles(law).to(device)
    return draw_by_quantile(quantile, entropy, count, device)


def _interpolate(table: torch.Tensor, steepness: torch.Tensor) -> torch.Tensor:
    """Evaluate cubic polynomials over an even grid on [0, LARGEST_LOG_TAIL]; overwrites ``steepness``.

    ``table`` holds their coefficients, (4, intervals).
    """
    import torch

    intervals = table.shape[1]
    place = steepness.mul_(intervals / LARGEST_LOG_TAIL)
    index = place.to(torch.int32).clamp_(max=intervals - 1)
    place.sub_(index)
    value = table[3].index_select(0, index)
    for coefficient in (table[2], table[1], table[0]):
        value.mul_(place).add_(coefficient.index_select(0, index))
    return value


@lru_cache(maxsize=32)
def _tail_quantiles(law: InverseScale) -> torch.Tensor:
    """Coefficients of the x with -log P(|z| > x) = s, as cubic Hermite polynomials in s, (4, intervals).

    For the published laws the relative error of x is about 1e-12.

    Gamma shapes much below 1e-2 would need finer knots; ``LmoDp`` refuses any below 1/2.
    """
    import torch

    s = np.linspace(0.0, LARGEST_LOG_TAIL, _KNOTS + 1)
    x = _solve_tail(law, s)
    slope = LARGEST_LOG_TAIL / _KNOTS / law.tilted(x)[0]
    rise = np.diff(x)
    left, right = slope[:-1], slope[1:]
    coefficients = np.stack([x[:-1], left, 3 * rise - 2 * left - right, left + right - 2 * rise])
    return torch.from_numpy(coefficients)


def _solve_tail(law: InverseScale, s: np.ndarray) -> np.ndarray:
    """The x with -log P(|z| > x) = s at each knot s: a first guess from a fine grid, then Newton steps in log x."""
    grid = np.geomspace(1e-9, 1e40, 400_000) / law.mean
    depth = -law.log_tail(grid)
    log_x = np.interp(s[1:], depth, np.log(grid))
    for _ in range(3):
        x = np.exp(log_x)
        log_x = log_x - (-law.log_tail(x) - s[1:]) / (x * law.tilted(x)[0])
    return np.concatenate([[0.0], np.exp(log_x)])


def _gamma_quantile(k: float, theta: float, probability: float) -> float:
    from scipy.special import gammaincinv

    return float(theta * gammaincinv(k, probability))


def _check_weights(noise: LmoDp) -> None:
    weights = noise._weights
    own = {item.name: item.default for item in fields(noise) if item.name.split("_")[0] in _PARTS}
    beside = [name for name, default in own.items() if getattr(noise, name) != default]
    if noise.preset != "none" and beside:
        problem = f"{noise.preset} comes with {', '.join(beside)} beside it"
        raise ConfigError("preset", problem, fix="set preset to none, or leave them out")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(name, f"{weight} is negative, which an inverse scale is not", fix="use 0 or more")
    for name in ("gamma_shape", "gamma_scale", "exponential_rate"):
        if not (math.isfinite(getattr(noise, name)) and getattr(noise, name) > 0):
            raise ConfigError(name, f"{getattr(noise, name)} is not positive", fix="use a positive number")
    if weights.get("gamma_weight") and noise.gamma_shape < _SHARPEST:
        problem = f"{noise.gamma_shape} bends the tail more sharply than the table that noise is drawn by"
        raise ConfigError("gamma_shape", problem, fix=f"use {_SHARPEST} or more")
    if not 0 <= noise.uniform_low < noise.uniform_high < math.inf:
        problem = f"[{noise.uniform_low}, {noise.uniform_high}] is not an interval above 0"
        raise ConfigError("uniform_low, uniform_high", problem, fix="use 0 <= low < high")
