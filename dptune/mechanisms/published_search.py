"""The parameter searches of PLRV-O and LMO-DP, as published: the epsilon that they meet is a claim, not a guarantee.

PLRV-O (section 5.1, algorithm 1) maximises C (k - 1) theta, clip radius over mean absolute noise, under its own
accountant. LMO-DP (section 4.3, algorithm 3, and the authors' code) searches a grid for either the largest epsilon of a
step below the target, or the largest chance that the noise stays within 0.9. All of it is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import gamma as gamma_law

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.laplace_noise import LmoDp, Plrvo
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.accounting.published_accountants import (
    LARGEST_MOMENT,
    MOST_MOMENTS,
    STEP_ORDERS,
    formal_mgf,
    formal_step_epsilons,
    plrvo_epsilon,
)
from dptune.privacy.calibration import calibrate
from dptune.privacy.release import Composition, Release

Array = NDArray[np.float64]
LmoMode = Literal["largest_epsilon", "usefulness"]

#: Gamma shapes: from where the variance is finite to the largest in PLRV-O's tables.
SMALLEST_SHAPE, LARGEST_SHAPE = 3.0, 6e4
_SMALLEST_INVERSE_SCALE = 0.1
_NEXT_TO_IMPOSSIBLE = 1e-6
#: Largest absolute noise that counts as useful in LMO-DP's second mode.
USEFUL = 0.9
_WEIGHTS = tuple(tenth / 10 for tenth in range(1, 10))
_SCALES_AND_SHAPES = ((1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (5.0, 1.0), (9.0, 0.5), (7.5, 1.0), (0.5, 1.0))
_GAMMA_PARTS = tuple(product(_WEIGHTS, _SCALES_AND_SHAPES))
_EXPONENTIAL_PARTS = tuple(product(_WEIGHTS, (0.1, 0.5, 1.0, 5.0)))
_UNIFORM_PARTS = tuple(product(_WEIGHTS, [(float(low), float(low + 1)) for low in range(9)]))


@dataclass(frozen=True)
class PlrvoProblem:
    """PLRV-O's constrained optimisation. It sees the clip radius C and theta as one product, C theta.

    Attributes:
        epsilon: the epsilon to claim, by algorithm 2.
        delta: the delta of that claim.
        sample_rate: the sample rate of every step.
        steps: number of steps of the run.
        dimension: number of coordinates of the gradient.
        max_grad_norm: the smallest clip radius that is allowed, which is the one chosen: the constraints on absolute
            noise (c1: a Laplace scale above 10 is next to impossible; c4: E |z| <= 10) are easiest there.
        largest_moment: largest order lambda of the accountant, which needs lambda C theta < 1. The paper has about
            1,000, under which a smaller epsilon is within reach of the constraints.
        largest_shape: upper bound of the shape k.
    """

    epsilon: float
    delta: float
    sample_rate: float
    steps: int
    dimension: int
    max_grad_norm: float = 1.0
    largest_moment: int = 200
    largest_shape: float = LARGEST_SHAPE

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ConfigError("dimension", f"{self.dimension} is not positive", fix="count the trainable parameters")
        if not 1 <= self.largest_moment <= MOST_MOMENTS:
            problem = f"{self.largest_moment} is not in [1, {MOST_MOMENTS}]"
            raise ConfigError("largest_moment", problem, fix="use 200, or 1000 as the paper")
        if not self.largest_shape > SMALLEST_SHAPE:
            raise ConfigError("largest_shape", f"{self.largest_shape} is not above 3", fix=f"use {LARGEST_SHAPE:g}")
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigError("max_grad_norm", f"{self.max_grad_norm} is not positive", fix="give the clip radius")

    def product(self, k: float) -> float:
        """The largest C theta that meets the claim, which is the best one for this k."""

        def claim(noise_multiplier: float) -> float:
            law = InverseScale(gamma=(k, 1 / ((k + 1) * noise_multiplier)))
            claims = (("dimension", float(self.dimension)), ("moments", float(self.largest_moment)))
            release = Release(self.sample_rate, 1 / law.score_bound, noise="laplace_mixture", law=law, claims=claims)
            return plrvo_epsilon(Composition({release: self.steps}), self.delta)

        largest = (1 - 1e-9) / self.largest_moment
        return min(largest, 1 / ((k + 1) * calibrate(claim, self.epsilon)))

    def signal(self, k: float) -> float:
        """The objective, C (k - 1) theta."""
        return (k - 1) * self.product(k)

    def solve(self) -> Plrvo:
        """The noise of largest signal. Raises: ConfigError if none meets the constraints."""
        bounds = (math.log(SMALLEST_SHAPE), math.log(self.largest_shape))
        inside = minimize_scalar(
            lambda log_k: -self.signal(math.exp(log_k)), bounds=bounds, method="bounded", options={"xatol": 0.05}
        )
        k = max((math.exp(inside.x), self.largest_shape), key=self.signal)  # the bounded search never tries its bounds
        theta = self.product(k) / self.max_grad_norm
        mean = 1 / ((k - 1) * theta)
        above = gamma_law.cdf(_SMALLEST_INVERSE_SCALE, k, scale=theta)
        if mean > 1 / _SMALLEST_INVERSE_SCALE or above > _NEXT_TO_IMPOSSIBLE:
            problem = (
                f"{self.epsilon} needs noise of mean {mean:.3g}, beyond the paper's constraints (a mean of 10 at most, "
                "and scales above 10 next to impossible)"
            )
            raise ConfigError("epsilon", problem, fix="raise epsilon, or lower max_grad_norm")
        moments = max(self.largest_moment, LARGEST_MOMENT)
        return Plrvo(k=k, theta=theta, max_grad_norm=self.max_grad_norm, dimension=self.dimension, moments=moments)


def lmo_dp_search(step_epsilon: float, delta: float, mode: LmoMode) -> LmoDp:
    """LMO-DP's grid search: the point that ``mode`` prefers among those that its equation 4 puts below the target.

    As in the authors' code, equation 4 is evaluated at all orders from 2 to 128 once order 2 is in its domain, even
    where the moments that it stands for are infinite. The search finds the parameters that the authors published.

    Args:
        step_epsilon: the target, the epsilon of one step, in (0, inf).
        delta: the delta of that epsilon.
        mode: "largest_epsilon" prefers the largest epsilon (ties: the more useful), "usefulness" the largest
            P(|z| <= 0.9).

    Raises: ConfigError if no point of the grid is below the target.
    """
    epsilons, useful = _grid(delta)
    score = epsilons if mode == "largest_epsilon" else useful
    allowed = (epsilons <= step_epsilon) & (epsilons > 0)
    if not allowed.any():
        problem = (
            f"{step_epsilon:.4g} for one step is below all of the grid ({epsilons[epsilons > 0].min():.4g} and more)"
        )
        raise ConfigError("epsilon", problem, fix="raise epsilon or delta")
    best = allowed & (score == score[allowed].max())
    return _point(int(np.flatnonzero(best)[np.argmax(useful[best])]))


@lru_cache(maxsize=8)
def _grid(delta: float) -> tuple[Array, Array]:
    """Claimed epsilon of a step (infinite if order 2 is outside the domain) and P(|z| <= 0.9) of every grid point."""
    times = np.concatenate([STEP_ORDERS - 1, -STEP_ORDERS, [-USEFUL]])
    gammas, exponentials, uniforms = (np.array([formal_mgf(law, times) for law in laws]) for laws in _axes())
    rest = exponentials[:, None] * uniforms[None]
    within = np.array([law.largest_mgf_argument > 1 for law in _axes()[1]])[:, None] & np.ones(
        len(uniforms), dtype=bool
    )
    orders, epsilons, useful = len(STEP_ORDERS), [], []
    with np.errstate(all="ignore"):
        for law, factor in zip(_axes()[0], gammas, strict=True):
            mgf = factor * rest
            claimed = formal_step_epsilons(mgf[..., :orders], mgf[..., orders : 2 * orders], STEP_ORDERS, delta)
            epsilons.append(np.where(within & (law.largest_mgf_argument > 1), claimed, np.inf))
            useful.append(1 - mgf[..., -1])
    return np.array(epsilons).ravel(), np.array(useful).ravel()


def _axes() -> tuple[list[InverseScale], list[InverseScale], list[InverseScale]]:
    """The laws of the three parts, weights included. A point's moment generating function is the product of theirs."""
    return (
        [InverseScale(gamma=(k, weight * theta)) for weight, (theta, k) in _GAMMA_PARTS],
        [InverseScale(exponential=weight / rate) for weight, rate in _EXPONENTIAL_PARTS],
        [InverseScale(uniform=(weight * low, weight * high)) for weight, (low, high) in _UNIFORM_PARTS],
    )


def _point(index: int) -> LmoDp:
    parts = (_GAMMA_PARTS, _EXPONENTIAL_PARTS, _UNIFORM_PARTS)
    gamma, exponential, uniform = np.unravel_index(index, [len(part) for part in parts])
    gamma_weight, (theta, k) = _GAMMA_PARTS[gamma]
    exponential_weight, rate = _EXPONENTIAL_PARTS[exponential]
    uniform_weight, (low, high) = _UNIFORM_PARTS[uniform]
    return LmoDp(
        preset="none",
        gamma_weight=gamma_weight,
        gamma_shape=k,
        gamma_scale=theta,
        exponential_weight=exponential_weight,
        exponential_rate=rate,
        uniform_weight=uniform_weight,
        uniform_low=low,
        uniform_high=high,
    )
