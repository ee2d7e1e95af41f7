"""Scores that tell two worlds apart by the releases of a step, learned from trials in both worlds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ENOUGH_TO_POOL = 4


@dataclass(frozen=True)
class Fit:
    """Centres and spreads of each coordinate of a release, with the sample in and out.

    Attributes:
        centre: (coordinates,) centres in and out.
        spread: (coordinates,) spreads in and out.
        power: 2 for Gaussian scores (means, standard deviations), 1 for Laplace scores (medians, mean absolute
            deviations), which detect a shift under heavy tails far better.
    """

    centre: tuple[NDArray[np.float64], NDArray[np.float64]]
    spread: tuple[NDArray[np.float64], NDArray[np.float64]]
    power: int

    @classmethod
    def of(cls, inside: NDArray[np.float64], outside: NDArray[np.float64], *, power: int, one_spread: bool) -> Fit:
        """Fit centres and spreads to (trials, coordinates) releases in both worlds.

        Args:
            one_spread: give both worlds the same spread.
        """
        inside, outside = _numbers_only(inside), _numbers_only(outside)
        centres = [np.median(values, axis=0) if power == 1 else values.mean(axis=0) for values in (inside, outside)]
        moments = [
            np.maximum((np.abs(values - centre) ** power).mean(axis=0), 1e-30)
            for values, centre in zip((inside, outside), centres, strict=True)
        ]
        if one_spread:
            moments = [(moments[0] + moments[1]) / 2] * 2
        one, other = (moment ** (1 / power) for moment in moments)
        uncertainty = float((one**2 / len(inside) + other**2 / len(outside)).mean())
        half = _towards_their_mean(centres[0] - centres[1], uncertainty) / 2
        middle = (centres[0] + centres[1]) / 2
        return cls((middle + half, middle - half), (one, other), power)

    def log_ratio(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(rows,) log-likelihood ratios of "in" against "out", as if coordinates were independent and of that law."""
        one, other = (
            -((np.abs(values - centre) / spread) ** self.power) / self.power - np.log(spread)
            for centre, spread in zip(self.centre, self.spread, strict=True)
        )
        return np.asarray((one - other).sum(axis=-1))


def _numbers_only(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rows without NaN; all rows if each has one, for a fit that then tells nothing."""
    rows = np.isfinite(values).all(axis=1)
    return values[rows] if rows.any() else values


def _towards_their_mean(shifts: NDArray[np.float64], uncertainty: float) -> NDArray[np.float64]:
    """Shrink the shifts towards their mean, the more so the less they differ beyond uncertainty (James and Stein)."""
    if len(shifts) < _ENOUGH_TO_POOL or not uncertainty > 0:
        return shifts
    mean, spread = shifts.mean(), shifts.var(ddof=1)
    share = max(0.0, 1 - uncertainty / spread) if spread > 0 else 0.0
    return np.asarray(mean + share * (shifts - mean))
