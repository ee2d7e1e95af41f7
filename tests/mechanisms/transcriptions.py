"""Transcriptions of mechanisms from their papers, in plain loops: the other side of the trajectory tests.

Nothing of dptune is imported, and no matrix product is used, so that an error in the library cannot be repeated here.
One ``step`` is one release: clip, sum, add noise, divide by the constant B; then the state moves.

Three numerical conventions of the library are taken over, because they are documented and exact comparison needs them:
radii are shrunk by ``MARGIN`` (by ``TRANSFORMED_MARGIN`` in other coordinates), noisy sums are rounded to a grid of
2^-20 standard deviations (of Laplace noises: mean sizes) and then to float32, and noise is made from 64-bit words,
lowest bit the sign, the others the tail. With ``margin=0`` the factors are the papers' own.

This file has the mechanisms whose radii are fixed or raw; ``transcribed_radii`` those whose radii move by a noisy
statistic, ``transcribed_coordinates`` AdaCliP and GeoClip, ``transcribed_noises`` the noises that are not Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARGIN, TRANSFORMED_MARGIN, GRID = 1e-9, 1e-6, 2.0**-20
Blocks = list[list[float]]


class Words:
    """Recorded 64-bit words, the entropy of a run: two of the same seed give the same words."""

    leaks = ("recorded",)

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def words(self, count: int) -> NDArray[np.uint64]:
        return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)


def signed_tails(entropy: Words, count: int) -> list[tuple[float, float]]:
    """(sign, tail) of each draw: the noise is the sign times that size which is exceeded with twice the tail."""
    words = [int(word) for word in entropy.words(count)]
    small = [place for place, word in enumerate(words) if word < 2 * 2**47]
    more = [int(word) for word in entropy.words(len(small))] if small else []
    found = []
    for place, word in enumerate(words):
        fraction = ((more[small.index(place)] >> 12) + 0.5) * 2.0**-52 if place in small else 0.5
        found.append((-1.0 if word & 1 else 1.0, ((word >> 1) + fraction) * 2.0**-64))
    return found


def normals(entropy: Words, count: int) -> list[float]:
    """Standard normals."""
    return [-sign * NormalDist().inv_cdf(tail) for sign, tail in signed_tails(entropy, count)]


def rounded(value: float, deviation: float) -> float:
    """A noisy sum on the public grid, in float32."""
    step = deviation * GRID
    return float(np.float32(round(value / step) * step))


def norm(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(float(value) ** 2 for value in values))


def cut(row: Sequence[float], sizes: Sequence[int]) -> Blocks:
    """A unit's gradient, pair after pair."""
    parts, at = [], 0
    for size in sizes:
        parts.append(list(row[at : at + size]))
        at += size
    return parts


class Transcription:
    """One mechanism of a run: ``sizes`` of the pairs, B, noise multiplier z.

    A ``step`` leaves what it used and computed behind: ``radii_used``, ``deviations_used``, ``exact`` (clipped sums and
    sums of the statistics), ``released_counts``.
    """

    #: Whether the factor of a unit that is not clipped is shrunk too.
    shrinks_all = True

    def __init__(self, sizes: Sequence[int], batch: float, z: float, margin: float = MARGIN) -> None:
        self.sizes, self.batch, self.z, self.margin = tuple(sizes), batch, z, margin

    def step(self, rows: Blocks, entropy: Words) -> list[float]:
        """The released gradient of a batch. A unit that is not finite everywhere counts as all zeros."""
        rows = [list(row) if all(map(math.isfinite, row)) else [0.0] * len(row) for row in rows]
        self.look(rows)
        sums, deviations, statistics = self.sums(rows), self.deviations(), self.statistics(rows)
        self.exact, self.radii_used = [list(block) for block in sums], self.radii()
        self.deviations_used = list(deviations)
        if statistics is not None:
            counts, deviation = statistics
            sums, deviations = [*sums, counts], [*deviations, deviation]
            self.exact.append(list(counts))
        out = self.add_noise(sums, deviations, entropy)
        self.released_counts = out.pop() if statistics is not None else None
        gradient = self.gradient(out)
        self.update(out, gradient)
        return gradient

    def factors(self, norms: list[float]) -> list[float]:
        """What multiplies each pair of a unit with these norms."""
        raise NotImplementedError

    def deviations(self) -> list[float]:
        """Standard deviation of the noise on each block."""
        raise NotImplementedError

    def radii(self) -> list[float]:
        return []

    def state(self) -> dict[str, Any]:
        """What the library's controller saves, under its names."""
        return {}

    def look(self, rows: Blocks) -> None:
        """A look at the raw batch, for mechanisms that are not private."""

    def statistics(self, rows: Blocks) -> tuple[list[float], float] | None:
        """Sums that are released beside the gradients, and the deviation of their noise."""
        return None

    def sums(self, rows: Blocks) -> Blocks:
        total = [[0.0] * size for size in self.sizes]
        for row in rows:
            parts = cut(row, self.sizes)
            for block, part, factor in zip(total, parts, self.factors([norm(part) for part in parts]), strict=True):
                shrunk = factor * (1 - self.margin) if factor < 1 or self.shrinks_all else factor
                for place, value in enumerate(part):
                    block[place] += shrunk * value
        return total

    def add_noise(self, sums: Blocks, deviations: list[float], entropy: Words) -> Blocks:
        draws = cut(normals(entropy, sum(map(len, sums))), [len(block) for block in sums])
        return [
            [rounded(value + deviation * draw, deviation) for value, draw in zip(block, drawn, strict=True)]
            for block, drawn, deviation in zip(sums, draws, deviations, strict=True)
        ]

    def gradient(self, out: Blocks) -> list[float]:
        return [float(np.float32(np.float32(value) / np.float32(self.batch))) for block in out for value in block]

    def update(self, out: Blocks, gradient: list[float]) -> None:
        """Move the state by what was released."""

    def resumed(self) -> None:
        """Lose what a killed process loses. States are saved, so most lose nothing."""


class Nonprivate(Transcription):
    """Plain training: no clipping, no noise; the divisor is still B."""

    def factors(self, norms: list[float]) -> list[float]:
        return [1.0] * len(norms)

    def deviations(self) -> list[float]:
        return [0.0] * len(self.sizes)

    def add_noise(self, sums: Blocks, deviations: list[float], entropy: Words) -> Blocks:
        return [[float(np.float32(value)) for value in block] for block in sums]


class Static(Transcription):
    """DP-SGD (Abadi et al. 2016, Algorithm 1): g min(1, C / |g|), noise z C."""

    def __init__(self, *args: Any, radius: float = 1.0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.radius = radius

    def factor(self, n: float) -> float:
        return min(1.0, self.radius / n) if n > 0 else 1.0

    def factors(self, norms: list[float]) -> list[float]:
        return [self.factor(norm(norms))] * len(norms)

    def deviations(self) -> list[float]:
        return [self.z * self.radius] * len(self.sizes)

    def radii(self) -> list[float]:
        return [self.radius]


class AutoS(Static):
    """AUTO-S (Bu et al. 2023, arXiv 2206.07136): g R / (|g| + gamma)."""

    def __init__(self, *args: Any, gamma: float = 0.01, **more: Any) -> None:
        super().__init__(*args, **more)
        self.gamma = gamma

    def factor(self, n: float) -> float:
        return self.radius / (n + self.gamma)


class Psac(Static):
    """PSAC (Xia et al. 2023, arXiv 2212.00328): g C / (|g| + r / (|g| + r))."""

    def __init__(self, *args: Any, r: float = 0.1, **more: Any) -> None:
        super().__init__(*args, **more)
        self.r = r

    def factor(self, n: float) -> float:
        return self.radius / (n + self.r / (n + self.r))


class RawQuantile(Static):
    """AutoClip as RLDP's paper describes it: C is the p-th quantile of this batch's raw norms. Not private."""

    def __init__(self, *args: Any, p: float = 0.5, **more: Any) -> None:
        super().__init__(*args, **more)
        self.p, self.start = p, self.radius

    def look(self, rows: Blocks) -> None:
        norms = sorted(norm(row) for row in rows)
        self.radius = self.start
        if norms:
            place = self.p * (len(norms) - 1)
            below = math.floor(place)
            above = min(below + 1, len(norms) - 1)
            self.radius = norms[below] + (place - below) * (norms[above] - norms[below]) or self.start


class PerPair(Transcription):
    """Clipping by pairs (McMahan et al. 2018, He et al. 2023): g_k min(1, C_k / |g_k|), noise s_k by scheme.

    "equal": z sqrt(K) C_k. "global": z |C|, which is DP-LoRA with one radius for all pairs. Weights w, scaled to
    |w| = 1: z C_k / w_k. "pair": z C_k, equation 6 of RLDP, whose joint multiplier is z / sqrt(K).
    """

    shrinks_all = False

    def __init__(
        self,
        *args: Any,
        radius: float | None = None,
        scheme: str = "equal",
        weights: Sequence[float] = (),
        stabiliser: float = 0.0,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        count = len(self.sizes)
        self.c = [1.0 / math.sqrt(count) if radius is None else radius] * count
        self.scheme, self.weights, self.stabiliser = scheme, weights, stabiliser

    def factors(self, norms: list[float]) -> list[float]:
        return [min(1.0, c / (n + self.stabiliser)) if n > 0 else 1.0 for c, n in zip(self.c, norms, strict=True)]

    def deviations(self) -> list[float]:
        if self.weights:
            return [self.z * c * norm(self.weights) / w for c, w in zip(self.c, self.weights, strict=True)]
        if self.scheme == "global":
            return [self.z * norm(self.c)] * len(self.c)
        return [self.z * c * (1.0 if self.scheme == "pair" else math.sqrt(len(self.c))) for c in self.c]

    def radii(self) -> list[float]:
        return list(self.c)
