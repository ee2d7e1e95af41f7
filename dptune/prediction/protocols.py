"""The two protocols as plans: their public options, and the cost of one token.

Both answer ``tokens`` tokens within (epsilon, delta) and then stop. A plan holds no data.

PMixED's radius is here as published: theorem 5.1, its amplification by sampling, and the part that can be proven.
Claims, not guarantees. Theorem 5.1 takes a bound at one Renyi order for a bound at all of them, and a radius that
depends on the size of the sample for one that does not (docs/findings/prediction.md, "Why theorem 5.1 fails").
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from dptune.core.digits import at_least, at_most
from dptune.core.errors import ConfigError
from dptune.core.settings import check_unit
from dptune.mechanisms.options import make_part, option_names
from dptune.prediction.mixture import Slots
from dptune.privacy.accountants import Epsilons, epsilons
from dptune.privacy.accounting.renyi_filter import budget_at
from dptune.privacy.release import Composition, Release

#: Rounds the cost of a token down, so that all of them together stay within the budget.
_ROUNDING = 1e-12
_LEAST_WEIGHT = 1e-6
_LARGEST_EXPONENT = 700.0
#: Largest radius at an infinite order. Weights are float64: of a law at e^-r of the public one, 1 less its weight is
#: right to a share of 2^-53 e^r, which the margin for rounding no longer covers beyond this.
_LARGEST_RADIUS = 16.0


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    epsilon: float = 8.0
    delta: float = 1e-5
    alpha: float = 3.0
    tokens: int = 1024
    models: int = 80

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError("epsilon", f"{self.epsilon} is not a positive number", fix="give the privacy budget")
        if not 0 < self.delta < 1:
            raise ConfigError("delta", f"{self.delta} is not in (0, 1)", fix="use 1e-5, say")
        if not self.alpha > 1:
            raise ConfigError("alpha", f"{self.alpha} is not above 1: no Renyi divergence has that order", fix="use 3")
        for name in ("tokens", "models"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        if self.rdp_budget <= 0:
            least = -budget_at(self.alpha, 0.0, self.delta)
            problem = f"{self.epsilon:g} at delta {self.delta:g} and alpha {self.alpha:g} is too small for one token"
            raise ConfigError("epsilon", problem, fix=f"raise it above {at_most(least, 4)}, or raise alpha")
        each, endless = self.rdp_per_token, math.isinf(self.alpha)
        if (each + math.log(self.models) if endless else (self.alpha - 1) * each) > _LARGEST_EXPONENT:
            raise ConfigError("epsilon", f"{self.epsilon:g} is beyond what one token can need", fix="lower it")

    @property
    def rdp_budget(self) -> float:
        """The Renyi epsilon at ``alpha`` that converts to (epsilon, delta); epsilon itself at an infinite order."""
        return self.epsilon if math.isinf(self.alpha) else budget_at(self.alpha, self.epsilon, self.delta)

    @property
    def rdp_per_token(self) -> float:
        """The Renyi epsilon of one token: an equal share of the budget."""
        return self.rdp_budget / self.tokens * (1 - _ROUNDING)


@dataclass(frozen=True, kw_only=True)
class FixedMixture(_Protocol):
    """The provable variant, ``dptune.prediction.mixture``.

    Attributes:
        epsilon: budget of all tokens together.
        delta: delta of that budget.
        alpha: the Renyi order at which tokens are bounded and added up; a whole number for every unit but shard.
        tokens: T, the number of tokens that may ever be answered.
        models: N, the number of slots of the ensemble, fixed before the data is seen.
        public_weight: w0 in (0, 1), the least weight of the public model.
        unit: unit of privacy: a whole shard ("shard"), one record ("record"), or all records of one unit (a column's
            name).
    """

    public_weight: float = 0.2
    unit: str = "shard"
    name: str = field(default="pmixed", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isinf(self.alpha):
            problem = "inf is an order of pmixed_published only (its appendix B)"
            raise ConfigError("alpha", problem, fix="use 3, or pmixed_published with subsample=1")
        if not _LEAST_WEIGHT <= self.public_weight < 1:
            problem = f"{self.public_weight} is not in [1e-6, 1): without a public floor nothing bounds a rare token"
            raise ConfigError("public_weight", problem, fix="use 0.2, say")
        if self.unit != "shard":
            check_unit(self.unit, "unit")
        if self.unit != "shard" and not (float(self.alpha).is_integer() and self.alpha >= 2):
            problem = f"{self.alpha:g} is not a whole number of 2 or more, which the bound for unit {self.unit} needs"
            raise ConfigError("alpha", problem, fix="use 3, or unit=shard")

    @property
    def slots(self) -> Slots:
        """The public constants of the mixture."""
        return Slots(self.models, self.public_weight)

    @property
    def excess(self) -> float:
        """The excess that one token may have; see ``Slots.excess``."""
        return self.slots.excess(self.rdp_per_token, self.alpha)

    @property
    def release(self) -> Release:
        """The release of one token."""
        return Release.of_token(self.alpha, self.rdp_per_token, _claims(self))

    @property
    def figures(self) -> dict[str, Any]:
        """Figures that follow from the options, by name."""
        radius = self.slots.radius(self.rdp_per_token, self.alpha) if self.unit == "shard" else None
        return {"radius": radius, "slot_floor": self.slots.floor, "slot_share": self.slots.share, "excess": self.excess}


@dataclass(frozen=True, kw_only=True)
class Published(_Protocol):
    """PMixed as published, Algorithm 1 with theorem 5.1. NOT proven, but for one model and for ``alpha`` infinity.

    At an infinite order (appendix B) each model's law stays within a factor e^r of the public one, token by token, and
    there is no sampling. That has a proof, for a shard that is left out while the radius r, which follows from the
    public number of models, stays as it is: ``pointwise_radius``.

    Attributes:
        epsilon: epsilon that the paper would claim for all tokens together.
        delta: delta of that claim.
        alpha: the Renyi order; a whole number from 2 with sampling; inf, without sampling, bounds every token.
        tokens: T, the number of tokens that may ever be answered.
        models: N, one for each shard.
        subsample: probability that a model is asked; 1 asks all, as theorem 5.1 itself.
        with_replacement: draw the sample's members with replacement, as the authors' code does.
    """

    subsample: float = 0.03
    with_replacement: bool = False
    unit: str = field(default="shard", init=False)
    name: str = field(default="pmixed_published", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.subsample <= 1:
            raise ConfigError("subsample", f"{self.subsample} is not in (0, 1]", fix="use 0.03, or 1 for all models")
        if self.subsample < 1 and not (float(self.alpha).is_integer() and self.alpha >= 2):
            problem = f"{self.alpha:g} is not a whole number of 2 or more, which amplification by sampling needs"
            raise ConfigError("alpha", problem, fix="use 3, or subsample=1")
        if math.isinf(self.alpha) and self.radii[0] > _LARGEST_RADIUS:
            most = _LARGEST_RADIUS
            if self.models > 1:
                most = math.log1p(math.expm1(2 * _LARGEST_RADIUS) / self.models)
            problem = (
                f"{self.epsilon:g} needs a radius of {self.radii[0]:.4g}; weights are exact up to {_LARGEST_RADIUS:g}"
            )
            raise ConfigError("epsilon", problem, fix=f"use {at_least(most * self.tokens, 4)} or less, or raise tokens")

    @cached_property
    def betas(self) -> tuple[float, ...]:
        """The factors beta*(n) for samples of n = 1, ..., N models; all equal if all models are asked.

        At an infinite order beta is 0, and ``radii`` has the product.
        """
        if math.isinf(self.alpha):
            return (0.0,) * self.models
        sizes = range(1, self.models + 1) if self.subsample < 1 else [self.models] * self.models
        order = int(self.alpha) if self.subsample < 1 else self.alpha
        return tuple(published_beta(self.rdp_per_token, size, order, self.subsample) for size in sizes)

    @property
    def radii(self) -> tuple[float, ...]:
        """The Renyi radius of samples of n = 1, ..., N models."""
        if math.isinf(self.alpha):
            return (pointwise_radius(self.rdp_per_token, self.models),) * self.models
        return tuple(self.alpha * beta for beta in self.betas)

    @property
    def release(self) -> Release:
        """The release of one token, which has a proven bound for one model, and at an infinite order."""
        if math.isinf(self.alpha):
            return Release.of_token(math.inf, self.rdp_per_token, (("pure", self.rdp_per_token),))
        proven = math.inf
        if self.models == 1:
            proven = one_model_epsilon(self.radii[0], self.alpha, self.subsample)
        return Release.of_token(self.alpha, proven, _claims(self))

    @property
    def figures(self) -> dict[str, Any]:
        """Figures that follow from the options, by name: one figure, or one for each size of the sample."""
        betas = list(self.betas) if self.subsample < 1 else self.betas[0]
        radii = list(self.radii) if self.subsample < 1 else self.radii[0]
        return {"radius": radii} | ({} if math.isinf(self.alpha) else {"beta": betas})


Protocol = FixedMixture | Published
PROTOCOLS: dict[str, type[FixedMixture] | type[Published]] = {"pmixed": FixedMixture, "pmixed_published": Published}
SUMMARIES = {
    "pmixed": "Private prediction: answers T tokens from an ensemble on disjoint shards and a public model, mixed with "
    "weights that are fixed in advance. Sound.",
    "pmixed_published": "Private prediction as published (PMixed, arXiv 2403.15638). NOT sound: theorem 5.1 takes a "
    "bound at one order for all, and its radius follows the size of the sample.",
}
PUBLISHED_ACCOUNTANT = "pmixed"


def protocol_of(name: str, options: Mapping[str, Any]) -> Protocol:
    """Make the protocol of that name with these options, as params.yaml or ``--set`` give them.

    Raises: ConfigError naming the option that is unknown or out of range.
    """
    known = option_names(PROTOCOLS[name])
    for option in options:
        if option not in known:
            raise ConfigError(option, f"protocol {name!r} has no such option", fix=f"use one of {', '.join(known)}")
    made: Protocol = make_part(PROTOCOLS[name], dict(options))
    return made


def planned_answers(protocol: Protocol, tokens: int | None = None) -> Composition:
    """The releases of the first ``tokens`` answers, or of all that the protocol may ever give."""
    return Counter({protocol.release: protocol.tokens if tokens is None else tokens})


def priced_answers(protocol: Protocol) -> Epsilons:
    """The three epsilons of all tokens that the protocol may ever answer."""
    return epsilons(planned_answers(protocol), protocol.delta, published_accountant=PUBLISHED_ACCOUNTANT)


def _claims(protocol: _Protocol) -> tuple[tuple[str, float], ...]:
    return (("order", protocol.alpha), ("renyi", protocol.rdp_per_token))


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
    ((N-1) + e^r)/N at most. With two models or more, neither does a law that becomes any other within the radius, as a
    changed record makes it: the ratio is ((N-1) + x)/N at most. (One model alone shows 2 epsilon then.)

    >>> round(pointwise_radius(8 / 1024, 80), 4)
    0.2435
    """
    return epsilon if models == 1 else math.log1p(models * math.expm1(epsilon)) / 2


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
