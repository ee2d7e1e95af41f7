"""Sums over grids of losses: powers of transforms, and tails from above."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


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
