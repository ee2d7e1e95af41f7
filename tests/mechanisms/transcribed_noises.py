"""Transcriptions of mechanisms whose noise is not independent Gaussian: Laplace, PLRV-O, LMO-DP and DP-BandMF."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from scipy.integrate import quad
from transcriptions import Blocks, PerPair, Static, Transcription, Words, cut, normals, rounded, signed_tails


class Laplace(Static):
    """The Laplace mechanism on gradients clipped in l1: g min(1, C / |g|_1), noise of scale z C."""

    def sums(self, rows: Blocks) -> Blocks:
        total = [[0.0] * size for size in self.sizes]
        for row in rows:
            factor = self.factor(math.fsum(map(abs, row))) * (1 - self.margin)
            for block, part in zip(total, cut(row, self.sizes), strict=True):
                for place, value in enumerate(part):
                    block[place] += factor * value
        return total

    def deviations(self) -> list[float]:
        return [math.sqrt(2.0) * self.z * self.radius] * len(self.sizes)

    def add_noise(self, sums: Blocks, deviations: list[float], entropy: Words) -> Blocks:
        """In a Laplace law twice the tail is exp(-size / scale)."""
        scale = self.z * self.radius
        return _noisy(sums, lambda tail: -scale * math.log(2 * tail), scale, entropy)


class Plrvo(Static):
    """PLRV-O (CCS 2025): Laplace noise of inverse scale u ~ Gamma(k, theta), fresh for each coordinate.

    One coordinate has a symmetric Lomax law: twice the tail is (1 + theta x)^-k. ``theta`` is for gradients clipped to
    C, and the noise is not multiplied by C. The multiplier of the library is z = 1 / ((k + 1) theta C).
    """

    def __init__(self, *args: Any, k: float = 40.0, theta: float = 0.0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.k, self.theta = k, theta or 1 / ((k + 1) * self.z * self.radius)

    def deviations(self) -> list[float]:
        return [math.sqrt(2 / ((self.k - 1) * (self.k - 2))) / self.theta] * len(self.sizes)

    def add_noise(self, sums: Blocks, deviations: list[float], entropy: Words) -> Blocks:
        mean = 1 / ((self.k - 1) * self.theta)
        return _noisy(sums, lambda tail: math.expm1(-math.log(2 * tail) / self.k) / self.theta, mean, entropy)


class LmoDp(Static):
    """LMO-DP (arXiv 2405.18776): Laplace noise of inverse scale u = a1 Gamma(k, theta) + a2 Exp(lambda) + a3 U(a, b).

    u is fresh for each coordinate, lambda is a rate, and the noise is multiplied by C (section 4.3 and appendix A.3).
    Twice the tail of one coordinate is M(-x), M the moment generating function of u. A ``multiplier`` rescales all
    weights to E u / E u^2 = multiplier.
    """

    def __init__(
        self, *args: Any, weights: tuple[float, float, float], gamma: tuple[float, float] = (1.0, 1.0),
        rate: float = 1.0, uniform: tuple[float, float] = (0.0, 1.0), multiplier: float = 0.0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        (self.theta, self.k), self.rate, (self.low, self.high) = gamma, rate, uniform
        self.weights = weights
        if multiplier:
            mean, square = self.moments()
            self.weights = tuple(weight * mean / square / multiplier for weight in weights)  # type: ignore[assignment]

    def moments(self) -> tuple[float, float]:
        a1, a2, a3 = self.weights
        mean = a1 * self.k * self.theta + a2 / self.rate + a3 * (self.low + self.high) / 2
        variance = a1**2 * self.k * self.theta**2 + a2**2 / self.rate**2 + a3**2 * (self.high - self.low) ** 2 / 12
        return mean, variance + mean**2

    def log_mgf(self, x: float) -> float:
        """log M(-x), x >= 0."""
        a1, a2, a3 = self.weights
        found = -self.k * math.log1p(a1 * self.theta * x) - math.log1p(a2 * x / self.rate)
        width = a3 * (self.high - self.low) * x
        if width > 0:
            found += math.log(-math.expm1(-width) / width) - a3 * self.low * x
        return found

    def size(self, tail: float) -> float:
        """The x with M(-x) = 2 tail, by halving the interval."""
        low, high = 0.0, 1.0
        while self.log_mgf(high) > math.log(2 * tail):
            high *= 2
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self.log_mgf(middle) > math.log(2 * tail) else (low, middle)
        return high

    def moment(self, power: int) -> float:
        """The integral of t^power M(-t) over t > 0: E|z| for power 0, Var z / 2 for power 1. Here t = s / (1 - s)."""

        def integrand(s: float) -> float:
            return (s / (1 - s)) ** power / (1 - s) ** 2 * math.exp(self.log_mgf(s / (1 - s)))

        return float(quad(integrand, 0, 1, epsabs=0, epsrel=1e-12, limit=500)[0])

    def deviations(self) -> list[float]:
        return [self.radius * math.sqrt(2 * self.moment(1))] * len(self.sizes)

    def add_noise(self, sums: Blocks, deviations: list[float], entropy: Words) -> Blocks:
        return _noisy(sums, lambda tail: self.radius * self.size(tail), self.radius * self.moment(0), entropy)


def _noisy(sums: Blocks, size: Callable[[float], float], mean: float, entropy: Words) -> Blocks:
    """Sums plus the sign times the size of each draw; the grid of Laplace noises is 2^-20 of their mean size."""
    sizes = [len(block) for block in sums]
    draws = cut([sign * size(tail) for sign, tail in signed_tails(entropy, sum(sizes))], sizes)
    return [
        [rounded(value + draw, mean) for value, draw in zip(block, drawn, strict=True)]
        for block, drawn in zip(sums, draws, strict=True)
    ]


def sqrt_strategy(bands: int) -> list[float]:
    """The closed form (Fichtenberger et al. 2022): c_i = c_(i-1) (2i - 1) / (2i), cut at b bands, |c| = 1."""
    c = [1.0]
    for i in range(1, bands):
        c.append(c[-1] * (2 * i - 1) / (2 * i))
    size = math.sqrt(math.fsum(value**2 for value in c))
    return [value / size for value in c]


class _Banded(Transcription):
    """DP-BandMF (Choquette-Choo et al. 2023, arXiv 2306.08153): w = (z - sum_i c_i w[-i]) / c_0 is the noise of a row.

    The release is s (G + sigma w). The sum runs over the last b - 1 rows since the recursion began, at most; a resumed
    process begins it anew. The deviation of a row is sigma s sqrt(V), with V the sum of the squares of the first
    entries of C^-1.
    """

    coefficients: Sequence[float]
    past: list[list[float]]

    def add_noise(self, sums: Blocks, deviations: list[float], entropy: Words) -> Blocks:
        c, w = self.coefficients, normals(entropy, sum(map(len, sums)))
        for i in range(1, min(len(c) - 1, len(self.past)) + 1):
            w = [one - c[i] * old for one, old in zip(w, self.past[-i], strict=True)]
        w = [one / c[0] for one in w]
        self.past.append(w)
        self.deviations_used = [deviation * math.sqrt(self.variance()) for deviation in deviations]
        return [
            [rounded(value + deviation * one, deviation) for value, one in zip(block, part, strict=True)]
            for block, part, deviation in zip(sums, cut(w, list(map(len, sums))), deviations, strict=True)
        ]

    def variance(self) -> float:
        """Sum of (C^-1)_i^2 over the rows since the recursion began."""
        c, inverse = self.coefficients, [1.0 / self.coefficients[0]]
        for row in range(1, len(self.past)):
            known = math.fsum(c[i] * inverse[row - i] for i in range(1, min(row, len(c) - 1) + 1))
            inverse.append(-known / c[0])
        return math.fsum(value**2 for value in inverse)

    def resumed(self) -> None:
        self.past = []


class Banded(_Banded, Static):
    """Correlated noise, the whole gradient clipped to one radius."""

    def __init__(self, *args: Any, coefficients: Sequence[float], **more: Any) -> None:
        super().__init__(*args, **more)
        self.coefficients, self.past = coefficients, []


class BandedPairs(_Banded, PerPair):
    """Correlated noise, each pair clipped to its own radius."""

    def __init__(self, *args: Any, coefficients: Sequence[float], **more: Any) -> None:
        super().__init__(*args, **more)
        self.coefficients, self.past = coefficients, []
