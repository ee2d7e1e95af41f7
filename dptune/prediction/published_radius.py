"""PMixED's radius as published: theorem 5.1, its amplification by sampling, and the part that can be proven.

Claims, not guarantees. Theorem 5.1 takes a bound at one Renyi order for a bound at all of them, and a radius that
depends on the size of the sample for one that does not (docs/findings/prediction.md, "Why theorem 5.1 fails").
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.renyi_filter import budget_at

_ROUNDING = 1e-12
_LARGEST_BETA = 1e4
_GRID = 4001
#: Relative amount by which the dual may be too small between points of the finer grid, with a factor of safety.
_BETWEEN = 1e-6

Array = NDArray[np.float64]


def theorem_epsilon(beta: float, models: int, order: float) -> float:
    """Renyi epsilon that theorem 5.1 claims for one token of ``models`` models with radius ``beta * order``."""
    if models <= 1:
        return beta * order
    return float(_log_mean(4 * (order - 1) * beta * order, models) / (order - 1))


def amplified_epsilon(beta: float, models: int, order: int, subsample: float) -> float:
    """Renyi epsilon of one token for a Poisson sample of ``models`` models, by the paper's amplification.

    It is the log of
    (1-q)^(a-1) (1 + (a-1) q) + sum over k = 2..a of C(a, k) (1-q)^(a-k) q^k exp((k-1) epsilon(k)), over a - 1.
    """
    if subsample == 1.0:
        return theorem_epsilon(beta, models, order)
    kept = math.log1p(-subsample)
    terms = [(order - 1) * kept + math.log1p((order - 1) * subsample)]
    for k in range(2, order + 1):
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        moment = (k - 1) * theorem_epsilon(beta, models, k)
        terms.append(float(choose + (order - k) * kept + k * math.log(subsample) + moment))
    return max(float(np.logaddexp.reduce(terms)), 0.0) / (order - 1)


@lru_cache(maxsize=4096)
def published_beta(rdp_per_token: float, models: int, order: int, subsample: float) -> float:
    """beta*(n) of the paper: the largest whose claimed epsilon is at most ``rdp_per_token``, rounded down.

    Raises: ConfigError if there is none up to 1e4.
    """
    from scipy.optimize import brentq

    def excess(log_beta: float) -> float:
        claimed = amplified_epsilon(math.exp(log_beta), models, order, subsample)
        return math.log(max(claimed, 1e-300) / rdp_per_token)

    low, high = math.log(1e-15), math.log(_LARGEST_BETA)
    if excess(high) < 0:
        raise ConfigError("epsilon", f"{rdp_per_token:.4g} per token needs no radius at all", fix="lower it")
    if excess(low) > 0:
        raise ConfigError("epsilon", f"{rdp_per_token:.4g} per token leaves no radius", fix="raise it, or ask less")
    beta = math.exp(brentq(excess, low, high, xtol=1e-14)) * (1 - _ROUNDING)
    while amplified_epsilon(beta, models, order, subsample) > rdp_per_token:
        beta *= 1 - _ROUNDING
    return beta


@lru_cache(maxsize=256)
def one_model_epsilon(radius: float, order: float, subsample: float) -> float:
    """The largest Renyi epsilon at ``order`` of one token of one model: there alone the published radius has a proof.

    The output law is (1-q) p0 + q p with D(p, p0) and D(p0, p) at most ``radius``. Any moment of the likelihood ratio
    rho is linear in the law of p / p0 under p0, so that its largest value is a linear program. Where that cannot be
    solved, and where it is no better, convexity alone: 1 - q + q e^((a-1) radius).
    """
    if subsample == 1.0:
        return radius
    convex = float(np.logaddexp(math.log1p(-subsample), math.log(subsample) + (order - 1) * radius)) / (order - 1)
    try:
        with np.errstate(all="ignore"):
            moments = [_largest_moment(radius, order, subsample, power) for power in (order, 1 - order)]
    except ValueError:  # the solver takes no infinities
        return convex
    if not all(moment > 1 and math.isfinite(moment) for moment in moments):
        return convex
    return min(convex, math.log(max(moments)) / (order - 1) * (1 + _BETWEEN))


def pointwise_radius(epsilon: float, models: int) -> float:
    """The radius r of appendix B: |log(p_i / p0)| <= r at every token makes one token of N models epsilon-DP.

    Equation 13, e^(2r) = N e^epsilon + 1 - N, where beta alpha is r; of one model alone, r = epsilon.

    Proof, for p, the mean of N laws, and p', that of the N - 1 others. At any token let x = e^(2r); the left-out law
    over p' is at most x, since both are within e^r of p0. Then p / p' = (N-1)/N + (that ratio)/N <= (N-1)/N + x/N =
    e^epsilon. The other way, with y <= x for p' over the left-out law, p' / p = N y / ((N-1) y + 1), which grows with
    y, and N x / ((N-1) x + 1) <= ((N-1) + x) / N, because ((N-1) x + 1)((N-1) + x) - N^2 x = (N-1)(x-1)^2 >= 0.
    (The paper's other direction puts an upper bound where a lower one belongs.) A shard whose place the public law
    takes shows no more: p0 is within e^r of both, so that the ratios are ((N-1) + x)/((N-1) + e^r) and
    ((N-1) + e^r)/N at most.

    >>> round(pointwise_radius(8 / 1024, 80), 4)
    0.2435
    """
    return epsilon if models == 1 else math.log1p(models * math.expm1(epsilon)) / 2


@lru_cache(maxsize=256)
def cheapest_order(epsilon: float, tokens: int, delta: float) -> tuple[float, float]:
    """The Renyi order, and the Renyi epsilon of one token there, by which ``tokens`` epsilon-DP tokens cost least.

    An epsilon-DP release has a divergence of at most min(epsilon, order epsilon^2 / 2) at each order (Bun and Steinke
    2016, proposition 3.3). The order decides only how tight the sum is.
    """
    orders = 1 + np.geomspace(1e-3, 1e7, 2001)
    renyi = np.minimum(epsilon, orders * epsilon**2 / 2)
    totals = [tokens * cost - budget_at(order, 0.0, delta) for order, cost in zip(orders, renyi, strict=True)]
    best = int(np.argmin(totals))
    return float(orders[best]), float(renyi[best]) * (1 + _ROUNDING)


def _largest_moment(radius: float, order: float, subsample: float, power: float) -> float:
    """Upper bound on E (1 - q + q rho)^power, by the program's dual: a function of rho that is nowhere less.

    The program is solved on a grid; what its dual lacks between the points, and far out, is added.
    """
    from scipy.optimize import linprog

    def aim(rho: Array) -> Array:
        return np.asarray((1 - subsample + subsample * rho) ** power)

    def constraints(rho: Array) -> Array:
        # E rho^a <= e^((a-1) r) and E rho^(1-a) <= e^((a-1) r), both divided by their right side.
        return np.stack([rho**order, rho ** (1 - order)]) * math.exp(-(order - 1) * radius)

    ratio, fine, far = (np.exp(_span(radius, order, *grid)) for grid in ((_GRID, 12), (16 * _GRID, 12), (_GRID, 250)))
    fixed = np.stack([np.ones_like(ratio), ratio])  # E 1 = E rho = 1
    solved = linprog(-aim(ratio), A_ub=constraints(ratio), b_ub=[1, 1], A_eq=fixed, b_eq=[1, 1])
    if not solved.success:
        return math.inf
    prices, (one, mean) = -solved.ineqlin.marginals, -solved.eqlin.marginals

    def lacks(rho: Array) -> Array:
        return np.asarray(aim(rho) - (one + mean * rho + prices @ constraints(rho)))

    prices = prices + max(float((lacks(far) / constraints(far).sum(axis=0)).max()), 0.0)
    return float(prices.sum() + one + mean + max(lacks(fine).max(), 0.0))


def _span(radius: float, order: float, count: int, beyond: float) -> Array:
    """(count,) grid of log rho, over the range in which both constraints are at most e^beyond."""
    return np.linspace(-radius - beyond / (order - 1), (order - 1) / order * radius + beyond / order, count)


def _log_mean(exponent: float, models: int) -> float:
    """log of (models - 1) / models + e^exponent / models, for small and large exponents."""
    if exponent < 1:
        return math.log1p(math.expm1(exponent) / models)
    return float(np.logaddexp(math.log1p(-1 / models), exponent - math.log(models)))
