"""Transcriptions of mechanisms whose radii move by a noisy statistic: quantile clipping and DC-SGD."""

from __future__ import annotations

import math
from typing import Any

from transcriptions import Blocks, PerPair, Static, Transcription, cut, norm


def below(value: float, radius: float) -> float:
    """1/2 for a norm within the radius, -1/2 for one above."""
    return 0.5 if value <= radius else -0.5


class _Counting(Transcription):
    """The update of Andrew et al. 2021 (arXiv 1905.03871): C <- C exp(-eta (b - gamma)), within public bounds."""

    gamma: float
    eta: float
    bounds: tuple[float, float]

    def moved(self, radius: float, count: float) -> float:
        share = count / self.batch + 0.5
        return min(max(radius * math.exp(-self.eta * (share - self.gamma)), self.bounds[0]), self.bounds[1])


class Quantile(Static, _Counting):
    """Quantile clipping, one radius: the count of units within C_t moves C_(t+1); z_Delta^-2 = z^-2 - (2 z_b)^-2."""

    def __init__(
        self, *args: Any, gamma: float = 0.5, eta: float = 0.2, z_b: float = 0.8,
        lowest: float = 1e-4, highest: float = 100.0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        self.gamma, self.eta, self.z_b, self.bounds = gamma, eta, z_b, (lowest, highest)

    def deviations(self) -> list[float]:
        return [(self.z**-2 - (2 * self.z_b) ** -2) ** -0.5 * self.radius] * len(self.sizes)

    def statistics(self, rows: Blocks) -> tuple[list[float], float]:
        count = 0.0
        for row in rows:
            count += below(norm([norm(part) for part in cut(row, self.sizes)]), self.radius)
        return [count], self.z_b

    def update(self, out: Blocks, gradient: list[float]) -> None:
        assert self.released_counts is not None
        self.radius = self.moved(self.radius, self.released_counts[0])

    def state(self) -> dict[str, Any]:
        return {"radii": [self.radius]}


class QuantileEach(PerPair, _Counting):
    """Quantile clipping, a radius for each of K pairs: K counts of joint sensitivity sqrt(K) / 2."""

    def __init__(
        self, *args: Any, gamma: float = 0.5, eta: float = 0.2, z_b: float = 1.4,
        lowest: float = 1e-4, highest: float = 100.0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        self.gamma, self.eta, self.z_b, self.bounds = gamma, eta, z_b, (lowest, highest)

    def deviations(self) -> list[float]:
        z_delta = (self.z**-2 - len(self.c) / (4 * self.z_b**2)) ** -0.5
        return [z_delta * math.sqrt(len(self.c)) * c for c in self.c]

    def statistics(self, rows: Blocks) -> tuple[list[float], float]:
        counts = [0.0] * len(self.c)
        for row in rows:
            for k, part in enumerate(cut(row, self.sizes)):
                counts[k] += below(norm(part), self.c[k])
        return counts, self.z_b

    def update(self, out: Blocks, gradient: list[float]) -> None:
        assert self.released_counts is not None
        self.c = [self.moved(c, count) for c, count in zip(self.c, self.released_counts, strict=True)]

    def state(self) -> dict[str, Any]:
        return {"radii": list(self.c)}


class DcSgd(Static):
    """DC-SGD (Wei et al. 2025, arXiv 2503.22988): a histogram of norms, noise z_H on each bin, chooses C_(t+1).

    Rule "P": the edge of the first bin at which more than the share p of the mass is passed. Rule "E": of the
    candidates 0.1 C to 2 C in tenths, again around the best while that is the first or last, the one of the least
    z_T^2 c^2 d / B^2 + (mean over the mass of (middle of a bin - c)^2 where that is positive).

    Bins double in width when the open one holds more than half of the mass, and halve when the upper half of the bins
    holds less than 1 / M of it. ``memory`` averages the histogram over steps (not in the paper; 0 is the paper).
    """

    def __init__(
        self, *args: Any, rule: str = "P", p: float = 0.5, bins: int = 20, width: float = 0.2, z_h: float = 6.0,
        memory: float = 0.0, lowest: float = 1e-3, highest: float = 100.0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        self.rule, self.p, self.bins, self.z_h, self.memory = rule, p, bins, z_h, memory
        self.stride, self.bounds = width * self.radius, (lowest, highest)
        self.histogram: list[float] = []

    def z_t(self) -> float:
        return float((self.z**-2 - self.z_h**-2) ** -0.5)

    def deviations(self) -> list[float]:
        return [self.z_t() * self.radius] * len(self.sizes)

    def statistics(self, rows: Blocks) -> tuple[list[float], float]:
        counts = [0.0] * self.bins
        for row in rows:
            whole = norm([norm(part) for part in cut(row, self.sizes)])
            counts[min(int(min(whole / self.stride, 1e9)), self.bins - 1)] += 1
        return counts, self.z_h

    def update(self, out: Blocks, gradient: list[float]) -> None:
        assert self.released_counts is not None
        fresh = [float(count) for count in self.released_counts]
        if self.histogram:
            fresh = [self.memory * a + (1 - self.memory) * b for a, b in zip(self.histogram, fresh, strict=True)]
        self.histogram = fresh
        counts = [max(count, 0.0) for count in fresh]
        total = math.fsum(counts)
        if total <= 0:
            return
        found = self.percentile(counts, total) if self.rule == "P" else self.least_error(counts, total)
        self.radius = min(max(found, self.bounds[0]), self.bounds[1])
        if counts[-1] > total / 2:
            stride = self.stride * 2
        elif math.fsum(counts[self.bins // 2 :]) < total / self.bins:
            stride = self.stride / 2
        else:
            return
        self.stride = min(max(stride, self.bounds[0] / self.bins), self.bounds[1])
        self.histogram = []  # bins of another width

    def percentile(self, counts: list[float], total: float) -> float:
        seen = 0.0
        for k in range(self.bins):
            seen += counts[k]
            if seen > self.p * total:
                return (k + 1) * self.stride
        return self.bins * self.stride

    def least_error(self, counts: list[float], total: float) -> float:
        centre = self.radius
        for _ in range(20):
            errors = []
            for tenth in range(1, 21):
                c = centre * tenth / 10
                bias = 0.0
                for k in range(self.bins):
                    middle = (k + 0.5) * self.stride
                    if middle > c:
                        bias += counts[k] * (middle - c) ** 2
                noise = self.z_t() ** 2 * c**2 * sum(self.sizes) / self.batch**2
                errors.append((noise + bias / total, tenth))
            best = min(errors)[1]
            c = centre * best / 10
            if best not in (1, 20) or not self.bounds[0] < c < self.bounds[1]:
                return c
            centre = c
        return centre

    def state(self) -> dict[str, Any]:
        return {"radius": self.radius, "stride": self.stride, "histogram": list(self.histogram)}
