"""Random allocation (balls in bins): each unit enters one batch of every epoch, a bin of its own choice.

**Statement.** In an epoch of T steps with noise z each unit enters one uniformly chosen step, by its own coin. Under
add/remove of one unit an epoch is dominated by P = the mean over t of N(e_t, z^2 I) from Q = N(0, z^2 I) in T
dimensions, and by Q from P; epochs compose. (Chua et al. 2025, Balls-and-Bins Sampling for DP-SGD; Feldman and Shenfeld
2025.)

**Proof.** Given the bins of all other units, each released sum is known up to its noise and, in the unit's step, a
vector g of norm at most 1 that hangs on earlier releases alone. Let x be a draw of P or Q. From x_t, the g of step t
and fresh noise one can make that step's release: g x_t, plus noise of variance z^2 across g and of what is missing
along it. So the epoch is a post-processing of x, step by step, whatever chooses g. Others' bins have the same law for
both data sets. QED

**Computation.** Under Q the likelihood ratio L = P / Q is the mean of T independent exp(n / z - 1 / (2 z^2)), n
standard normal. Both divergences, E_Q (L - e^epsilon)_+ and E_Q (1 - e^epsilon L)_+, are convex in L. So is what any
further epochs make of it. A law of L that is spread out further with the same mean therefore costs at least as much.
Each law here lies on a grid of log L; whatever falls between two of its points is split between them so that the mean
stays. Independent sums keep that order, so T terms are added by doubling. A lowest share of the probability is moved to
0 and the first point, a highest share of the mean to infinity, which spread it too.

A sum of positive numbers has a relative error of a few units times their number. A split that is off by a share e moves
the mean of a cell by e times its width. Both are far below ``_ROUNDING``, by which all masses and losses are raised.
Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dptune.privacy.accounting.composed_losses import grid_epsilon
from dptune.privacy.accounting.sampled_gaussian import Array, GridLosses, Kind, _cell_probabilities, _reach

#: Share of delta for what is moved to 0 or to infinity, in an epoch.
_CUT = 1e-6
_ROUNDING = 1e-9
#: A grid is halved until that changes epsilon by less than this share (three times the error that is left, which falls
#: with the square of the width), or until it has this many points.
_PRECISION, _MOST_POINTS = 3e-3, 12_000
#: Terms are added on a grid that is up to this many times wider, 2 to this power, as their errors average out.
_WIDER = 3
#: A grid's widths are log 2 over powers of 2.
_COARSEST, _FINEST = 2, 16
#: Below this noise the terms span more than a double's exponent.
_LEAST_NOISE = 0.08


@dataclass(frozen=True)
class _Terms:
    """A law of a sum of terms of mean 1, spread out no less than the true one.

    Attributes:
        terms: the number of terms, which is the mean.
        first: the lowest point is exp(first width).
        mass: (n,) probabilities of the points.
        zero: probability of a sum of 0.
        infinite: share of the mean at infinity, times ``terms``.
    """

    terms: int
    first: int
    mass: Array
    zero: float
    infinite: float

    def values(self, width: float) -> Array:
        """(n,) the points."""
        return np.exp(width * (self.first + np.arange(len(self.mass))))

    def finer(self) -> _Terms:
        """The same on a grid of half the width."""
        mass = np.zeros(2 * len(self.mass) - 1)
        mass[::2] = self.mass
        return _Terms(self.terms, 2 * self.first, mass, self.zero, self.infinite)

    def trimmed(self, width: float, cut: float) -> _Terms:
        """Without its ends: the lowest share ``cut`` of the probability, the highest share of the mean."""
        values = self.values(width)
        means = self.mass * values
        low = int(np.searchsorted(np.cumsum(self.mass), cut))
        high = len(self.mass) - int(np.searchsorted(np.cumsum(means[::-1]), cut * self.terms))
        if low >= high - 1:
            return self
        mass = self.mass[low:high].copy()
        raised = float(means[:low].sum()) / float(values[low])
        mass[0] += raised
        zero = self.zero + max(float(self.mass[:low].sum()) - raised, 0.0) + float(self.mass[high:].sum())
        return _Terms(self.terms, self.first + low, mass, zero, self.infinite + float(means[high:].sum()))


@lru_cache(maxsize=1024)
def allocation_epsilon(noise_multiplier: float, bins: int, epochs: int, delta: float, *, quick: bool = False) -> float:
    """An epsilon for which the epochs are certainly (epsilon, delta)-DP, under add/remove of one unit.

    Guarantee: never below the least such epsilon. Infinity if it finds none.

    Args:
        noise_multiplier: effective noise multiplier, above 0.
        bins: number T of batches in an epoch, 1 or more.
        epochs: number of epochs.
        delta: a number in (0, 1).
        quick: stop at the first grids.

    Example:
        >>> from dptune.privacy.samplers.random_allocation import allocation_epsilon
        >>> round(allocation_epsilon(1.0, bins=100, epochs=1, delta=1e-5), 2)
        0.62
    """
    if noise_multiplier < _LEAST_NOISE:
        return math.inf
    least, cut = math.inf, _CUT * delta / epochs
    # The first grid resolves the loss of the mean of all terms, as if it were lognormal.
    spread = math.sqrt(math.log1p(math.expm1(min(noise_multiplier**-2, 500.0)) / bins))
    start = min(max(math.ceil(math.log2(4 * math.log(2) / spread)), _COARSEST), _FINEST)
    for power in range(start, _FINEST + 1):
        law = _mean(noise_multiplier, bins, power, cut)
        width = math.log(2) / 2**power
        # Both directions use the same grid of likelihood ratios. Masses and losses are rounded so that epsilon can only
        # grow.
        more = 1 + _ROUNDING
        losses = width * (law.first + np.arange(len(law.mass)))
        remove = GridLosses(law.first, losses, law.mass * law.values(width) * more, law.infinite * more)
        last = law.first + len(law.mass) - 1
        add = GridLosses(-last, -losses[::-1], law.mass[::-1] * more, law.zero * more)
        kind = Kind(1.0, noise_multiplier, epochs)
        found = max(grid_epsilon([(grid, kind)], width, delta) for grid in (remove, add)) + epochs * _ROUNDING
        gain = least - found
        least = min(least, found)
        if gain < _PRECISION * least or (quick and math.isfinite(least)) or 2 * len(law.mass) > _MOST_POINTS:
            break
    return least


def _mean(noise: float, bins: int, power: int, cut: float) -> _Terms:
    """The law of the mean of ``bins`` terms, on a grid of width log 2 / 2^power."""
    levels = max(bins.bit_length() - 1, 0)

    def power_at(level: int) -> int:
        return max(power - min((levels - level) // 3, _WIDER), 1)

    here = power_at(0)
    double = _one(noise, math.log(2) / 2**here, cut)
    total: _Terms | None = None
    for level in range(levels + 1):
        while here < power_at(level):
            here, double, total = here + 1, double.finer(), total and total.finer()
        width = math.log(2) / 2**here
        if bins >> level & 1:
            total = double if total is None else _added(total, double, width).trimmed(width, cut)
        if level < levels:
            double = _added(double, double, width).trimmed(width, cut)
    assert total is not None
    return _divided(total, math.log(2) / 2**here)


def _one(noise: float, width: float, cut: float) -> _Terms:
    """The law of one term."""
    reach, middle = _reach(cut), 1 / (2 * noise**2)
    low = math.floor((-reach / noise - middle) / width)
    high = math.ceil(((reach + 1 / noise) / noise - middle) / width)
    places = np.arange(low, high + 1, dtype=np.float64) * width
    ends = (places + middle) * noise
    mine, means = _cell_probabilities(ends), _cell_probabilities(ends - 1 / noise)
    values = np.exp(places)
    inner = mine[1:-1]
    upper = np.clip((means[1:-1] / values[:-1] - inner) / math.expm1(width), 0.0, inner)
    mass = np.zeros(len(values))
    mass[1:] += upper
    mass[:-1] += inner - upper
    raised = means[0] / values[0]
    mass[0] += raised
    return _Terms(1, low, mass, max(float(mine[0] - raised), 0.0) + float(mine[-1]), float(means[-1]))


def _added(one: _Terms, other: _Terms, width: float) -> _Terms:
    """The law of an independent sum. Two points a distance apart add up to the same place above the higher one."""
    first = min(one.first, other.first)
    ends = one.first + len(one.mass), other.first + len(other.mass)
    mass = np.zeros(max(ends) - first + math.ceil(math.log(2) / width) + 2)
    apart = np.arange(max(ends) - first)
    places = np.log1p(np.exp(-width * apart)) / width
    up = np.floor(places).astype(int)
    # exp(width place) lies between two points: its share of the upper one keeps the mean.
    share = np.clip(np.expm1(width * (places - up)) / math.expm1(width), 0.0, 1.0)
    for a, b in ((one, other), (other, one)):
        # Points of ``a`` that lie ``d`` above those of ``b``.
        for d in range(int(a is not one or one is other), len(apart)):
            low, high = max(a.first, b.first + d), min(a.first + len(a.mass), b.first + d + len(b.mass))
            if low >= high:
                continue
            both = a.mass[low - a.first : high - a.first] * b.mass[low - d - b.first : high - d - b.first]
            to = low - first + up[d]
            mass[to : to + len(both)] += (1 - share[d]) * both
            mass[to + 1 : to + 1 + len(both)] += share[d] * both
        if one is other:
            mass *= 2
            both = one.mass**2
            to = one.first - first + up[0]
            mass[to : to + len(both)] += (1 - share[0]) * both
            mass[to + 1 : to + 1 + len(both)] += share[0] * both
            break
    for a, b in ((one, other), (other, one)):
        mass[a.first - first : a.first - first + len(a.mass)] += b.zero * a.mass
    infinite = one.infinite + other.infinite
    return _Terms(one.terms + other.terms, first, mass, one.zero * other.zero, infinite)


def _divided(total: _Terms, width: float) -> _Terms:
    """The law of the sum over its number of terms, on the same grid."""
    shift = -math.log(total.terms) / width
    down = math.floor(shift)
    share = min(max(math.expm1(width * (shift - down)) / math.expm1(width), 0.0), 1.0)
    mass = np.zeros(len(total.mass) + 1)
    mass[:-1] += (1 - share) * total.mass
    mass[1:] += share * total.mass
    return _Terms(1, total.first + down, mass, total.zero, total.infinite / total.terms)
