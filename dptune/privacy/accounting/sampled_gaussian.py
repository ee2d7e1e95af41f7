"""Loss distribution of one Poisson-sampled Gaussian release, on a grid, never better than the true one.

``remove`` compares the mixture (1 - q) N(0, z^2) + q N(1, z^2) with N(0, z^2), ``add`` the reverse: the two dominating
pairs of add/remove adjacency (Zhu, Dong and Wang 2022). ``replace`` is sampling without replacement at a fixed batch
(see ``sampler_bounds``): losses above 0 as in ``remove``, below 0 as in ``add``, and the rest of the mass at 0. At an
outcome x the loss of ``remove`` is log(1 - q + q exp((x - 1/2) / z^2)), which grows with x; that of ``add`` is minus
it. Everything here is public.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erfcx, log_ndtr, ndtr, ndtri

Array = NDArray[np.float64]
Direction = Literal["remove", "add", "replace"]

#: Range of noise multipliers for which the rounding bounds below are argued and tested.
LEAST_NOISE, MOST_NOISE = 0.02, 1e6
#: Bound on the relative error of a cell's probability. Errors found against mpmath are below 2e-13 (see the tests).
MASS_ERROR = 1e-12
_SMALLEST_SHARE = 1e-300
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


class Kind(NamedTuple):
    """Equal releases: their sample rate in (0, 1], noise multiplier within the range above, and number."""

    sample_rate: float
    noise_multiplier: float
    releases: int


@dataclass(frozen=True)
class GridLosses:
    """A loss distribution on a grid.

    Attributes:
        first: the lowest loss, in units of the width of a cell.
        losses: the losses, ``width * (first + i)``. Shape (n,).
        mass: their probabilities. Shape (n,).
        infinite: probability of an infinite loss.
    """

    first: int
    losses: Array
    mass: Array
    infinite: float


def grid_losses(kind: Kind, direction: Direction, width: float, cut: float) -> GridLosses:
    """The loss distribution of one release, rounded to multiples of ``width``.

    Guarantee: it dominates the true one, up to a relative error of ``MASS_ERROR`` in every probability and the rounding
    of the grid's ends, which ``end_error`` bounds. The mass of a cell is split between its two ends so that its
    probability under both hypotheses is kept; no dominating distribution on the grid is tighter (connect the dots:
    Doroshenko et al. 2022). A share of at most ``cut`` lies above the grid and counts as infinite; losses below the
    grid count as its lowest loss.
    """
    if direction == "replace":
        return _symmetric(grid_losses(kind, "remove", width, cut), grid_losses(kind, "add", width, cut), width)
    q, z, _ = kind
    reach = _reach(cut) * z
    low = math.floor(float(_loss(q, z, -reach)) / width)
    high = math.ceil(float(_loss(q, z, 1 + reach)) / width)
    ends = _outcomes(q, z, np.arange(low, high + 1, dtype=np.float64) * width)
    without, within = _cell_probabilities(ends / z), _cell_probabilities((ends - 1) / z)
    mixture, errors = (1 - q) * without + q * within, _relative_errors(ends / z, 1 / z)
    if direction == "remove":
        return _split(low, mixture, without, errors, width)
    return _split(-high, without[::-1], mixture[::-1], errors[::-1], width)


def _symmetric(remove: GridLosses, add: GridLosses, width: float) -> GridLosses:
    """Losses above 0 of the first, those below 0 of the second, the rest at 0.

    That rest is a difference and may be rounded down, so a little is added to it. More mass at a loss of 0 makes the
    composition one with fewer releases, which costs no more.
    """
    first, last = min(add.first, 0), max(remove.first + len(remove.mass) - 1, 0)
    mass = np.zeros(last - first + 1)
    below, above = add.mass[: max(-add.first, 0)], remove.mass[max(1 - remove.first, 0) :]
    mass[: len(below)] = below
    mass[len(mass) - len(above) :] = above
    mass[-first] = max(0.0, 1.0 - float(mass.sum()) - remove.infinite) + 8 * MASS_ERROR
    return GridLosses(first, np.arange(first, last + 1, dtype=np.float64) * width, mass, remove.infinite)


def end_error(kind: Kind) -> float:
    """Bound on the distance of an outcome's true loss from its cell, due to the rounding of the cell's ends.

    An outcome is off by a few units in the last place of at most 40 standard deviations, and the loss has a slope of
    at most 1 / z per standard deviation.
    """
    return 2.0**-53 * 256 * (1 + 1 / kind.noise_multiplier)


def log_moment(kind: Kind, tilt: float, direction: Direction, cut: float) -> float:
    """Estimate log E exp(tilt loss) over the outcomes that ``grid_losses`` keeps. NOT a bound.

    At a high tilt, outcomes outside, which hardly ever happen, would dominate it (that is why Renyi DP is loose there).
    """
    q, z, _ = kind
    reach = _reach(cut) * z
    x = np.linspace(-reach, 1 + reach, 2001)
    terms = (-tilt if direction == "add" else tilt + 1) * _loss(q, z, x) - x**2 / (2 * z**2)
    most = float(terms.max())
    return most + math.log(float(np.exp(terms - most).sum()) * (x[1] - x[0]) / (z * math.sqrt(2 * math.pi)))


def _reach(cut: float) -> float:
    """Number of standard deviations that a normal variable exceeds with probability ``cut``."""
    return -float(ndtri(max(cut, _SMALLEST_SHARE)))


def loss_range(kind: Kind, cut: float) -> float:
    """Width of the range of losses that ``grid_losses`` keeps."""
    q, z, _ = kind
    reach = _reach(cut) * z
    return float(_loss(q, z, 1 + reach) - _loss(q, z, -reach))


def _relative_errors(ends: Array, shift: float) -> Array:
    """Bound on the relative error of the probabilities of the inner cells.

    The ends are rounded once for each hypothesis, by up to three units in the last place, so in a narrow cell the two
    probabilities are of slightly different outcomes.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        sizes = np.maximum(np.abs(ends[:-1]), np.abs(ends[1:])) + shift
        errors = MASS_ERROR + 8 * 2.0**-53 * sizes / np.diff(ends)
    return np.where(np.isfinite(errors), errors, MASS_ERROR)


def _split(first: int, mine: Array, other: Array, errors: Array, width: float) -> GridLosses:
    """Split each cell's mass between its ends.

    ``mine`` and ``other`` are the cells' probabilities under the two hypotheses, from the cell below the grid to the
    one above; ``errors`` bounds the relative errors of the cells between.
    """
    inner, theirs = mine[1:-1], other[1:-1]
    losses = np.arange(first, first + len(inner) + 1, dtype=np.float64) * width
    # Losses beyond 700 would overflow; capping them only moves more mass up.
    upper = (inner - np.exp(np.minimum(losses[:-1], 700.0)) * theirs) / -math.expm1(-width)
    # Rounding of the probabilities may put this share of a cell's mass too low; moving it up keeps the bound.
    upper = np.clip(upper + inner * (4 * errors / min(width, 1.0)), 0.0, inner)
    mass = np.zeros(len(losses))
    mass[1:] += upper
    mass[:-1] += inner - upper
    mass[0] += mine[0]
    return GridLosses(first, losses, mass, float(mine[-1]))


def _loss(q: float, z: float, x: Array | float) -> Array:
    none = math.log1p(-q) if q < 1 else -math.inf
    return np.asarray(np.logaddexp(none, math.log(q) + (np.asarray(x) - 0.5) / z**2))


def _outcomes(q: float, z: float, losses: Array) -> Array:
    """The outcomes at which ``remove`` has these losses; -inf if every loss is larger.

    The expression loses no digits if a loss is near its least value, log(1 - q).
    """
    above_least = np.maximum(losses - (math.log1p(-q) if q < 1 else -math.inf), 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(0.5 + z**2 * (losses - math.log(q) + np.log(-np.expm1(-above_least))))


def _cell_probabilities(ends: Array) -> Array:
    """Standard normal probabilities of the cells between ascending ``ends``, and of those below and above them.

    Narrow cells are integrated by quadrature: a difference of two tails would lose the digits that they share.
    """
    lower, upper = ends[:-1], ends[1:]
    with np.errstate(invalid="ignore"):
        cells = np.where(lower > 0, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))
        half = (upper - lower) / 2
        narrow = np.flatnonzero(2 * half * np.maximum(np.maximum(np.abs(lower), np.abs(upper)), 1.0) < 1.0)
    points = (lower[narrow] + half[narrow])[:, None] + half[narrow, None] * _NODES
    cells[narrow] = half[narrow] * (np.exp(-(points**2) / 2) @ _WEIGHTS) / math.sqrt(2 * math.pi)
    return np.concatenate([ndtr(ends[:1]), cells, ndtr(-ends[-1:])])


# Gaussian differential privacy: the exact conversion between its mu, epsilon and delta (Dong, Roth and Su 2022).


def gdp_epsilon(mu: float, delta: float) -> float:
    """Epsilon of mu-Gaussian DP at delta, by the exact conversion.

    Example:
        >>> from dptune.privacy.accounting.sampled_gaussian import gdp_epsilon
        >>> round(gdp_epsilon(mu=1.0, delta=1e-5), 4)
        4.3772
    """
    if math.isinf(mu):
        return math.inf
    if mu == 0 or gdp_delta(mu, 0.0) <= delta:
        return 0.0
    from scipy.optimize import brentq

    high = 1.0
    while gdp_delta(mu, high) > delta:
        high *= 2
        if math.isinf(high):
            return math.inf
    root, _ = brentq(lambda epsilon: gdp_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-15, full_output=True)
    return float(root)


def gdp_delta(mu: float, epsilon: float) -> float:
    """Delta of mu-Gaussian DP at epsilon, without overflow.

    e^epsilon Phi(-x) with x = epsilon / mu + mu / 2 is exp(-(epsilon / mu - mu / 2)^2 / 2) erfcx(x / sqrt(2)) / 2.
    """
    away = epsilon / mu - mu / 2
    second = erfcx((epsilon / mu + mu / 2) / math.sqrt(2)) / 2 * np.exp(-away * away / 2)
    return float(np.exp(log_ndtr(-away)) - second)


# Sums over grids of losses: powers of transforms, and tails from above.


_LARGEST_EXPONENT = 600.0


def _power(base: NDArray[Any], exponent: int) -> NDArray[Any]:
    """The power by repeated squaring, whose relative error is at most ``6 exponent`` rounding units on any machine."""
    power = np.ones_like(base)
    while exponent:
        if exponent & 1:
            power = power * base
        exponent >>= 1
        if exponent:
            base = base * base
    return power


def _sums_above(terms: Array) -> Array:
    """The sum of all later terms, for each place."""
    sums = np.cumsum(terms[::-1])[::-1]
    return np.append(sums[1:], 0.0)


def _first_within(above: Array, other: Array, away: Array, target: float) -> float:
    """The least e with ``above - exp(e) other <= target``, both sums being over the places after e.

    The first place if all places satisfy it, infinity if none does.
    """
    # Capped where an exponential would overflow: less is subtracted, so the bound only grows.
    fits = np.flatnonzero(above - np.exp(np.minimum(away, _LARGEST_EXPONENT)) * other <= target)
    if not len(fits):
        return math.inf
    place = int(fits[0])
    if place == 0:
        return float(away[0])
    # Between two places the sums are those over the places after the left one.
    low, high = float(away[place - 1]), float(away[place])
    left, taken = float(above[place - 1]) - target, float(other[place - 1])
    if left <= 0:
        return low
    return min(max(math.log(left) - math.log(taken), low), high) if taken > 0 else high
