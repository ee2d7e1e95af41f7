"""Epsilon of composed Poisson-sampled Gaussian releases: tight, and never too small at any delta.

The loss distributions of the releases are tilted by exp(tilt loss) and composed by one FFT. Without the tilt, the
round-off of an FFT is about ``releases * 2^-53`` in delta itself, of either sign, in which a small delta is lost (so it
is in dp-accounting). Tilted, the sums lie where the losses near epsilon are, the round-off is relative to delta, and a
bound of it is added. Whatever else is rounded, cut off or wrapped around makes delta larger, never smaller; each
place says by how much. Everything here is public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, rfft
from scipy.optimize import minimize_scalar

from dptune.privacy.accounting.sampled_gaussian import (
    _LARGEST_EXPONENT,
    LEAST_NOISE,
    MASS_ERROR,
    MOST_NOISE,
    Array,
    Direction,
    GridLosses,
    Kind,
    _first_within,
    _power,
    _sums_above,
    end_error,
    grid_losses,
    log_moment,
    loss_range,
)

#: About the relative error that the grid adds to epsilon: on the grid of a first estimate, and on the final one.
_ROUGH, _FINE = 8e-3, 5e-4
#: The tilt is a little below Chernoff's, under which rare large losses would spread the sums too widely. That raises
#: round-off by a factor of up to exp of this, which is still small.
_ROOM = 5.0
#: Below this epsilon the grid gets no finer.
_SMALL = 0.01
_WIDEST = 0.5
#: Deltas near which a profile is tight, and about the relative error that its grid adds to an epsilon.
_PROFILED, _SMOOTH = (1e-2, 1e-5, 1e-9, 1e-14), 1e-4
#: Number of grids to try: a coarse grid does not show the slope of log delta, which the width of the next depends on.
_PASSES = 5
#: Share of delta that goes to losses above the grid, and to sums above the window.
_CUT = 1e-6
#: Share of delta that goes to releases that hardly ever meet a unit.
_RARE = 1e-5
_LONGEST = 1 << 23
_MOST_CELLS = 1 << 20
_UNIT = 2.0**-53
#: Type of the FFT's numbers: 64 bits of mantissa if the processor has them. If hardly any release meets a unit, sums
#: near 0 outweigh all others, and their round-off would dominate delta. Numbers of 128 bits would be too slow.
_REAL: type = np.longdouble if np.finfo(np.longdouble).nmant == 63 else np.float64
#: Largest number of kinds of release that are priced one by one; more are merged into fewer.
_EXACT, _FEW = 64, 256
_MERGED, _PLANNED = 0.001, 0.03  # in log noise: epsilon grows by up to twice as much


def composed_epsilon(kinds: Sequence[Kind], delta: float, *, quick: bool = False) -> float:
    """An epsilon for which the composition is certainly (epsilon, delta)-DP, under add/remove of one unit.

    It is within 1 % of the least such epsilon for epsilon from 0.02 to 20, delta from 1e-14 to 0.1, up to 64 kinds and
    10^8 releases; looser on a processor with 53-bit numbers if delta is small and releases hardly ever meet a unit.
    Infinity if it finds none (delta far below 1e-100, or sums too widely spread for an FFT).

    Args:
        kinds: at least one kind, each with a count of at least one.
        delta: a number in (0, 1).
        quick: stop at the first grid, which gives a looser bound several times faster.
    """
    kinds, delta = _without_rare(kinds, delta)
    if delta <= 0:
        return math.inf
    if not kinds:
        return 0.0
    kinds = [kind._replace(noise_multiplier=min(kind.noise_multiplier, MOST_NOISE)) for kind in kinds]
    step = _MERGED
    merged = kinds
    while len(merged) > (_EXACT if merged is kinds else _FEW):
        # Merge the original kinds each time: rounding what was rounded could go one step too far.
        merged, step = merge(kinds, step), 2 * step
    passes = 1 if quick else _PASSES
    remove = _epsilon(merged, delta, "remove", passes, at_least=0.0)
    # A unit that is added changes no probability by more than this, whatever the noise.
    most = sum(kind.releases * -math.log1p(-kind.sample_rate) if kind.sample_rate < 1 else math.inf for kind in merged)
    most *= 1 + MASS_ERROR
    if most <= remove:
        return remove
    return max(remove, min(most, _epsilon(merged, delta, "add", passes, at_least=remove)))


def replaced_epsilon(kind: Kind, delta: float, *, quick: bool = False) -> float:
    """Compute an upper bound on epsilon for batches drawn without replacement (the pair in ``sampler_bounds``)."""
    kind = kind._replace(noise_multiplier=min(kind.noise_multiplier, MOST_NOISE))
    if kind.noise_multiplier < LEAST_NOISE:
        return math.inf
    return _epsilon([kind], delta, "replace", 1 if quick else _PASSES, at_least=0.0)


def grid_epsilon(grids: Sequence[tuple[GridLosses, Kind]], width: float, delta: float, *tilts: float) -> float:
    """An epsilon of releases by their grids. Near 0 Chernoff's tilt may miss it, and others should be tried too."""

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (sum(kind.releases * _tilted(grid, tilt)[1] for grid, kind in grids) - math.log(delta)) / tilt

    found = minimize_scalar(bound, bounds=(math.log(1e-3), math.log(1e6)), method="bounded", options={"xatol": 1e-3})
    chernoff = _tilt_share([kind for _, kind in grids], delta) * math.exp(found.x)
    sums = (
        _Sum(tuple(_Tilted(kind, grid, *_tilted(grid, tilt)) for grid, kind in grids), width, tilt)
        for tilt in (chernoff, *tilts)
    )
    return min(one.epsilon(delta)[0] for one in sums)


def composed_deltas(kinds: Sequence[Kind], at: Array, direction: Direction) -> Array:
    """Bounds of delta at many epsilons in one direction: the composition's privacy profile.

    Guarantee: never below the truth. ("remove" is the divergence of the run with the unit from the run without it.)
    Each tilt's bound is near the truth at some epsilons only, so the least of several is taken.

    Args:
        kinds: at least one kind, with noise multipliers within the accountant's range.
        at: (n,) epsilons, 0 or more, ascending.
    """
    planned = max(_PROFILED)
    cut = _CUT * _PROFILED[-1] / sum(kind.releases for kind in kinds)
    tilt, epsilon = _chernoff(kinds, planned, direction, cut)
    width = _width(kinds, epsilon, tilt, _SMOOTH, cut)
    tilts = [0.0, *(_tilt_share(kinds, d) * _chernoff(kinds, d, direction, cut)[0] for d in _PROFILED)]
    bounds = [_Sum.of(kinds, direction, width, cut, tilt).deltas(at) for tilt in tilts]
    return np.asarray(np.minimum.reduce(bounds))


def _without_rare(kinds: Sequence[Kind], delta: float) -> tuple[list[Kind], float]:
    """The kinds that have to be priced, and the delta that is left for them.

    A unit that no release meets loses nothing, whatever the noise. So a release may be left out if the chance that it
    meets the unit is taken from delta. That is done for all releases if delta is large enough, for those with too
    little noise for the grid, and for those that hardly ever meet a unit: their rare large losses would make the grid
    coarse for all others.
    """
    chances = {  # the probability that any release of the kind meets a given unit
        kind: -math.expm1(kind.releases * math.log1p(-kind.sample_rate)) if kind.sample_rate < 1 else 1.0
        for kind in kinds
    }
    if sum(chances.values()) <= delta * (1 - MASS_ERROR):
        return [], delta
    left, spent = [], 0.0
    for kind in sorted(kinds, key=lambda kind: chances[kind]):
        if kind.noise_multiplier < LEAST_NOISE or spent + chances[kind] <= _RARE * delta:
            spent += chances[kind]
        else:
            left.append(kind)
    return left, delta - spent * (1 + MASS_ERROR)


def merge(kinds: Sequence[Kind], step: float) -> list[Kind]:
    """Merge kinds into fewer, each release with at most as much noise and at least as high a rate.

    Noise and rate are rounded to a grid of ``step`` in the logarithm, the same for all compositions. The grid of twice
    the step is part of it, so a part of a composition never gets less noise than the whole.
    """
    counts: dict[tuple[float, float], int] = {}
    for q, z, count in kinds:
        pair = (
            max(q, min(1.0, math.exp(math.ceil(math.log(q) / step) * step))),
            max(LEAST_NOISE, min(z, math.exp(math.floor(math.log(z) / step) * step))),
        )
        counts[pair] = counts.get(pair, 0) + count
    return [Kind(q, z, count) for (q, z), count in sorted(counts.items())]


def _epsilon(kinds: Sequence[Kind], delta: float, direction: Direction, passes: int, at_least: float) -> float:
    """Epsilon in one direction; any number up to ``at_least`` if it is not above that. Each grid gives a bound."""
    cut = _CUT * delta / sum(kind.releases for kind in kinds)
    tilt, epsilon = _chernoff(kinds, delta, direction, cut)
    share = _tilt_share(kinds, delta)
    width, least = _width(kinds, epsilon, tilt, _ROUGH, cut), math.inf
    for _ in range(passes):
        total = _Sum.of(kinds, direction, width, cut, share * tilt)
        epsilon, slope = total.epsilon(delta)
        least = min(least, epsilon)
        wanted = _width(kinds, epsilon, slope, _FINE, cut)
        if least <= at_least + 2 * total.slack or math.isinf(epsilon) or width < 1.02 * wanted:
            break
        width = wanted
    return least


def _tilt_share(kinds: Sequence[Kind], delta: float) -> float:
    """The share of Chernoff's tilt to use: 1 if hardly any release meets a unit and delta is small, for then the many
    sums near 0 make the round-off.
    """
    if delta < 1e-10 and sum(kind.releases * kind.sample_rate for kind in kinds) < 1:
        return 1.0
    return max(0.6, 1 - math.sqrt(_ROOM / -math.log(delta)))


def _chernoff(kinds: Sequence[Kind], delta: float, direction: Direction, cut: float) -> tuple[float, float]:
    """The tilt that minimises (log E exp(tilt loss) - log delta) / tilt, and that minimum. They tell where to search;
    no bound depends on them.
    """
    few = merge(kinds, _PLANNED) if len(kinds) > 1 else kinds

    def bound(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (sum(kind.releases * log_moment(kind, tilt, direction, cut) for kind in few) - math.log(delta)) / tilt

    found = minimize_scalar(bound, bounds=(math.log(1e-3), math.log(1e6)), method="bounded", options={"xatol": 1e-3})
    return math.exp(found.x), float(found.fun)


def _width(kinds: Sequence[Kind], epsilon: float, slope: float, precision: float, cut: float) -> float:
    """Width of a cell of the grid, for a relative error of ``precision`` in epsilon.

    Splitting the mass of a cell adds about width^2 / 6 to the variance of a loss. For every release that adds
    (slope + 1) / 2 times as much to epsilon, ``slope`` being -d log delta / d epsilon.
    """
    releases = sum(kind.releases for kind in kinds)
    width = min(math.sqrt(12 * precision * max(epsilon, _SMALL) / ((1 + slope) * releases)), _WIDEST)
    return max(width, max(loss_range(kind, cut) for kind in kinds) / _MOST_CELLS)


@dataclass(frozen=True)
class _Tilted:
    """A kind of release under the tilt: probabilities that add up to 1, and the logarithm of their sum before."""

    kind: Kind
    grid: GridLosses
    mass: Array
    log_total: float


def _tilted(grid: GridLosses, tilt: float) -> tuple[Array, float]:
    with np.errstate(divide="ignore"):
        exponents = tilt * grid.losses + np.log(grid.mass)
    most = float(exponents.max())
    weights = np.exp(exponents - most)
    total = float(weights.sum())
    return weights / total, most + math.log(total)


@dataclass(frozen=True)
class _Placed:
    """All sums of losses in a window, by their distance e from the mean.

    delta(mean + e) is at most ``rest`` and exp(log_scale) times the sum over ``away`` > e of the first weights less
    exp(e) times that of the second.
    """

    mean: float
    log_scale: float
    rest: float
    away: Array
    weights: tuple[Array, Array]


@dataclass(frozen=True)
class _Sum:
    """The sum of the losses of all releases, on one grid and under one tilt."""

    terms: tuple[_Tilted, ...]
    width: float
    tilt: float

    @classmethod
    def of(cls, kinds: Sequence[Kind], direction: Direction, width: float, cut: float, tilt: float) -> _Sum:
        terms = []
        for kind in kinds:
            grid = grid_losses(kind, direction, width, cut)
            terms.append(_Tilted(kind, grid, *_tilted(grid, tilt)))
        return cls(tuple(terms), width, tilt)

    def epsilon(self, delta: float) -> tuple[float, float]:
        """The least epsilon at which the bound of delta below is at most ``delta``, and the slope there:
        -d log delta / d epsilon."""
        found = self._placed()
        if found is None or found.rest >= delta:
            return math.inf, 0.0
        # Capping the exponent avoids an overflow, and makes the target only stricter.
        target = math.exp(min(math.log(delta - found.rest) - found.log_scale, _LARGEST_EXPONENT))
        weights, others = found.weights
        above, other = _sums_above(weights), _sums_above(others)
        place = _first_within(above, other, found.away, target)
        slope = math.exp(min(place, _LARGEST_EXPONENT)) * float(np.interp(place, found.away, other)) / target
        return max(0.0, found.mean + place) + self.slack, slope

    def deltas(self, at: Array) -> Array:
        """(n,) bounds of delta at the ascending epsilons ``at``; 1 where this tilt gives none."""
        placed = self._placed()
        if placed is None:
            return np.ones(len(at))
        away = placed.away
        above, other = (np.cumsum(weights[::-1])[::-1] for weights in placed.weights)
        # Rounding of the grid's ends may put every loss this much too low.
        places = at - placed.mean - self.slack
        later = np.minimum(np.searchsorted(away, places, side="right"), len(away) - 1)
        exponents = np.minimum(places, _LARGEST_EXPONENT)
        inside = np.maximum(above[later] - np.exp(exponents) * other[later], 0.0)
        # Below the kept places sums are missing, beyond the last place none is left.
        inside = np.where(places >= away[-1], 0.0, inside)
        with np.errstate(divide="ignore"):
            found = placed.rest + np.exp(np.minimum(np.log(inside) + placed.log_scale, 1.0))
        return np.where(places < away[0], 1.0, np.minimum(found, 1.0))

    def _placed(self) -> _Placed | None:
        """The masses of all sums in the window; None if there are more than memory holds."""
        mean, deviation = self._moments()
        first, last, beyond = self._window(deviation)
        length = 1 << max(4, math.ceil(math.log2(last - first + 1)))
        if length > _LONGEST:
            return None
        away = np.arange(first, first + length, dtype=np.float64) * self.width - mean
        # The weights of lower sums would overflow; they only add to delta at epsilons far below the answer.
        kept = away * (self.tilt + 1) > -_LARGEST_EXPONENT
        mass, away = self._composed(first, length)[kept], away[kept]
        log_scale = self._log_scale(mean)
        top = min(log_scale - self.tilt * float(away[-1]), _LARGEST_EXPONENT)
        rest = beyond * math.exp(top) + sum(2 * term.kind.releases * term.grid.infinite for term in self.terms)
        # Bound on the rounding of a sum of n positive terms, and of their exponentials.
        rounding = (2 * length + 4 * _LARGEST_EXPONENT) * _UNIT
        above = mass * np.exp(-self.tilt * away) * (1 + rounding)
        return _Placed(mean, log_scale, rest, away, (above, mass * np.exp(-(self.tilt + 1) * away) * (1 - rounding)))

    @property
    def slack(self) -> float:
        """The error that the rounding of the grid's ends adds to epsilon."""
        return sum(term.kind.releases * end_error(term.kind) for term in self.terms)

    def _moments(self) -> tuple[float, float]:
        mean = variance = 0.0
        for term in self.terms:
            center = float(term.mass @ term.grid.losses)
            mean += term.kind.releases * center
            variance += term.kind.releases * float(term.mass @ (term.grid.losses - center) ** 2)
        return mean, math.sqrt(variance)

    def _window(self, deviation: float) -> tuple[int, int, float]:
        """First and last cell of the window, and Chernoff's bound on the tilted probability above it.

        Sums below the window are wrapped around to its upper end, where they only raise the bound.
        """
        # ``_ROOM``: as the tilt is below Chernoff's, the sums above the window weigh more relative to delta.
        wanted = 10 - math.log(_CUT) + _ROOM
        here = self._log_moment(0.0)
        # Small factors are for rare large losses, whose size the deviation does not show.
        factors = (1e-4, 1e-3, 4e-3, 0.015, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0)
        steps = [factor * math.sqrt(2 * wanted) / max(deviation, self.width) for factor in factors]
        above = min((self._log_moment(step) - here + wanted) / step for step in steps)
        below = max((here - self._log_moment(-step) - wanted) / step for step in steps)
        return math.floor(below / self.width) - 1, math.ceil(above / self.width) + 1, 2 * math.exp(-wanted)

    def _log_moment(self, further: float) -> float:
        """The log moment, log E exp((tilt + further) sum)."""
        return sum(term.kind.releases * _tilted(term.grid, self.tilt + further)[1] for term in self.terms)

    def _log_scale(self, mean: float) -> float:
        """The log moment about the mean, log E exp(tilt (sum - mean)), plus a bound on the relative errors so far."""
        total = error = 0.0
        for term in self.terms:
            ends = max(abs(term.grid.losses[0]), abs(term.grid.losses[-1]))
            total += term.kind.releases * term.log_total
            error += term.kind.releases * (4 * MASS_ERROR + 8 * _UNIT * self.tilt * ends)
        error += 8 * _UNIT * (abs(total) + abs(self.tilt * mean))
        return total - self.tilt * mean + error

    def _composed(self, first: int, length: int) -> Array:
        """Upper bounds of the tilted probabilities of the sums ``first``, ..., ``first + length - 1`` (in cells).

        An input of an FFT reaches an output through log2(length) butterflies, so the FFT of non-negative numbers that
        add up to 1 is off by at most 8 log2(length) units of rounding. |a^n - b^n| is at most
        n |a - b| max(|a|, |b|)^(n - 1), and a product of such powers likewise. The inverse FFT is off by as much as
        the first, relative to the sum of its inputs.
        """
        unit = float(np.finfo(_REAL).eps) / 2
        error = 8 * math.log2(length) * unit
        product = np.ones(length // 2 + 1, dtype=np.result_type(_REAL, np.complex64))
        log_larger, relative = np.zeros(len(product)), np.zeros(len(product))
        for term in self.terms:
            cells = (term.grid.first + np.arange(len(term.mass))) % length
            transform = rfft(np.bincount(cells, term.mass, length).astype(_REAL))
            size, count = np.abs(transform).astype(np.float64), term.kind.releases
            product *= _power(transform, count)
            log_larger += count * np.log(size + error)
            relative += count * (error / (size + error) + 8 * unit)
        errors = np.exp(log_larger) * np.minimum(relative, 2.0)
        both = np.full(len(product), 2.0)  # every frequency but the first and the last stands for two
        both[[0, -1]] = 1.0
        slack = float(both @ (errors + error * np.abs(product).astype(np.float64))) / length
        mass = np.roll(irfft(product, length), -(first % length)).astype(np.float64)
        return np.maximum(mass, 0.0) * (1 + 4 * _UNIT) + slack
