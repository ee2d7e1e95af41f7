"""Delta of composed Poisson-sampled Gaussian releases by a road of its own: no grid of losses, no FFT, no bound.

    delta(epsilon) = 1 / (2 pi i) * integral over Re w = tilt of M(w) exp(-w epsilon) / (w (w + 1)) dw

with M(w) = E exp(w loss) of the sum (Alghamdi et al. 2023, the saddle-point accountant). M is a product over the
releases, each by the trapezoid rule over outcomes, and the integral by the trapezoid rule as well, which both converge
exponentially. Near the saddle point everything is of one sign and size, so that errors are relative to delta itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtr

Releases = Sequence[tuple[float, float, int]]  # sample rate, noise multiplier, count
_NODES = 1501
_COARSE, _FINE = 8, 16  # points of the integral at a time, as rows and columns of a product
_FARTHEST = 14.0  # standard deviations


def _outcomes(rate: float, noise: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Loss at every node under ``remove``, and the logarithm of the node's weight without the unit."""
    x = np.linspace(-_FARTHEST * noise, 1 + _FARTHEST * noise, _NODES)
    sampled = math.log(rate) + (2 * x - 1) / (2 * noise**2)
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -np.inf, sampled)
    return loss, -(x**2) / (2 * noise**2) + math.log((x[1] - x[0]) / (noise * math.sqrt(2 * math.pi)))


class Saddle:
    """Delta at any epsilon, in one direction."""

    def __init__(self, releases: Releases, direction: str) -> None:
        self._parts = [(*_outcomes(rate, noise), count) for rate, noise, count in releases]
        self._remove = direction == "remove"

    def log_moment(self, w: NDArray[np.complex128]) -> NDArray[np.complex128]:
        power = w + 1 if self._remove else -w
        total = np.zeros(len(w), dtype=np.complex128)
        for loss, weight, count in self._parts:
            exponents = power[:, None] * loss + weight
            most = exponents.real.max(axis=1, keepdims=True)
            total += count * (most[:, 0] + np.log(np.exp(exponents - most).sum(axis=1)))
        return total

    def _along(self, tilt: float, step: float, first: int) -> NDArray[np.complex128]:
        """``log_moment`` at evenly spaced points above ``tilt``: powers of one rotation, so few exponentials."""
        real, sign = (tilt + 1, 1j) if self._remove else (-tilt, -1j)
        coarse, fine = first + _FINE * np.arange(_COARSE), np.arange(_FINE)
        total = np.zeros(_COARSE * _FINE, dtype=np.complex128)
        for loss, weight, count in self._parts:
            exponents = real * loss + weight
            most = exponents.max()
            turn = sign * step * loss
            sums = (np.exp(exponents - most) * np.exp(coarse[:, None] * turn)) @ np.exp(turn[:, None] * fine)
            total += count * (most + np.log(sums.ravel()))
        return total

    def _real(self, tilt: float) -> float:
        return float(self.log_moment(np.array([complex(tilt)]))[0].real)

    def delta(self, epsilon: float, negligible: float) -> float:
        """Delta at ``epsilon``; 0 where Chernoff's bound of it is below ``negligible``."""
        found = minimize_scalar(
            lambda u: self._real(math.exp(u)) - math.exp(u) * epsilon, bounds=(-6.0, 11.0), method="bounded"
        )
        tilt = math.exp(found.x)
        here, near = self._real(tilt), 1e-3 * tilt
        if here - tilt * epsilon < math.log(negligible):
            return 0.0
        curvature = max((self._real(tilt + near) - 2 * here + self._real(tilt - near)) / near**2, 1e-12)
        step = min(1 / math.sqrt(curvature), tilt, 1.0) / 8
        total, first = 0.0, 0
        while first < 40_000:
            t = step * (first + np.arange(_COARSE * _FINE))
            w = tilt + 1j * t
            values = (np.exp(self._along(tilt, step, first) - here - 1j * t * epsilon) / (w * (w + 1))).real
            total += float(values.sum()) - (values[0] / 2 if first == 0 else 0.0)
            if np.abs(values).max() < 1e-12 * abs(total):
                return math.exp(here - tilt * epsilon) * total * step / math.pi
            first += _COARSE * _FINE
        return math.nan


def true_delta(releases: Releases, epsilon: float, negligible: float) -> float:
    """The larger of both directions. Not a number where the integral converges too slowly (a few releases)."""
    return max(Saddle(releases, direction).delta(epsilon, negligible) for direction in ("remove", "add"))


def true_epsilon(releases: Releases, delta: float, near: float) -> float:
    """Epsilon at ``delta``, looked for from a tenth below to a twentieth above ``near``."""

    def excess(epsilon: float) -> float:
        return math.log(true_delta(releases, epsilon, delta / 100) / delta)

    return float(brentq(excess, 0.9 * near, 1.05 * near, xtol=1e-6 * near, rtol=1e-8))


def rare_epsilon(releases: Releases, delta: float, width: float) -> tuple[float, float]:
    """A lower and an upper bound of epsilon under ``remove``, for a few releases that hardly ever meet the unit.

    Every loss is rounded down (and up) to a multiple of ``width``, and the distributions are multiplied out term by
    term: sums of positive numbers alone, so that no digit of a small delta is lost.
    """
    bounds = []
    for up in (0, 1):
        total, first, beyond = np.ones(1), 0, 0.0
        for rate, noise, count in releases:
            lowest, mass, infinite = _cells(rate, noise, width)
            for _ in range(count):
                total, first, beyond = np.convolve(total, mass), first + lowest + up, beyond + up * infinite
        losses = width * (first + np.arange(len(total)))
        bounds.append(_solved(losses, total, beyond, delta))
    return bounds[0], bounds[1]


def _cells(rate: float, noise: float, width: float) -> tuple[int, NDArray[np.float64], float]:
    """Probabilities of the losses between ``width * (lowest + i)`` and ``width * (lowest + i + 1)``, and of those above
    all of them: outcomes more than eight standard deviations away, which the lower bound leaves out.
    """
    lowest = math.floor(math.log1p(-rate) / width)
    most = math.log1p(rate * math.expm1((0.5 + 8 * noise) / noise**2))
    ends = width * np.arange(lowest, math.ceil(most / width) + 1)
    odds = np.maximum(np.expm1(ends) / rate, -1.0)  # -1: below the least loss
    with np.errstate(divide="ignore"):
        outcomes = 0.5 + noise**2 * np.log1p(odds)
    tails = (1 - rate) * ndtr(-outcomes / noise) + rate * ndtr((1 - outcomes) / noise)
    return lowest, tails[:-1] - tails[1:], float(tails[-1])


def _solved(losses: NDArray[np.float64], mass: NDArray[np.float64], beyond: float, delta: float) -> float:
    def excess(epsilon: float) -> float:
        above = losses > epsilon
        return float(mass[above] @ -np.expm1(epsilon - losses[above])) + beyond - delta

    return float(brentq(excess, 0.0, losses[-1], xtol=1e-12))
