"""Transcriptions of AdaCliP and GeoClip, which clip and add noise in coordinates made from past releases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from transcriptions import TRANSFORMED_MARGIN, Blocks, Transcription, norm


def clipped(values: list[float], radius: float) -> list[float]:
    n = norm(values)
    factor = min(1.0, radius * (1 - TRANSFORMED_MARGIN) / n) if n > 0 else 1.0
    return [factor * value for value in values]


class AdaClip(Transcription):
    """AdaCliP (Pichapati et al. 2019, arXiv 1908.07643): w = (g - m) / b, clipped to 1; b_j = sqrt(s_j sum s).

    From the released gradient g: m <- beta_1 m + (1 - beta_1) g, and s^2 <- beta_2 s^2 + (1 - beta_2) v with
    v = B ((g - m)^2 - b^2 z^2 / B^2), clamped to [h_1, h_2], about the *new* m. Two things are the library's: the
    factor B, which makes v the variance of one unit, and bounds that are multiples of the starting variance.
    """

    def __init__(
        self, *args: Any, b1: float = 0.99, b2: float = 0.999, start: float = 1.0, h1: float = 0.01, h2: float = 10.0,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        d = sum(self.sizes)
        self.b1, self.b2 = b1, b2
        self.m, self.var = [0.0] * d, [start**2 / d] * d
        self.h1, self.h2 = h1 * start**2 / d, h2 * start**2 / d

    def b(self) -> list[float]:
        s = [math.sqrt(v) for v in self.var]
        root = math.sqrt(math.fsum(s))
        return [math.sqrt(one) * root for one in s]

    def sums(self, rows: Blocks) -> Blocks:
        b, total = self.b(), [0.0] * len(self.m)
        for row in rows:
            w = [(g - m) / one for g, m, one in zip(row, self.m, b, strict=True)]
            for place, value in enumerate(clipped(w, 1.0)):
                total[place] += value
        return [total]

    def deviations(self) -> list[float]:
        return [self.z]

    def gradient(self, out: Blocks) -> list[float]:
        return [
            float(np.float32(one * (r / self.batch) + m)) for one, r, m in zip(self.b(), out[0], self.m, strict=True)
        ]

    def update(self, out: Blocks, gradient: list[float]) -> None:
        b = self.b()
        self.m = [self.b1 * m + (1 - self.b1) * g for m, g in zip(self.m, gradient, strict=True)]
        for j, g in enumerate(gradient):
            v = self.batch * ((g - self.m[j]) ** 2 - b[j] ** 2 * self.z**2 / self.batch**2)
            self.var[j] = self.b2 * self.var[j] + (1 - self.b2) * min(max(v, self.h1), self.h2)

    def state(self) -> dict[str, Any]:
        return {"mean": list(self.m), "variance": list(self.var)}


def jacobi(matrix: Blocks) -> list[float]:
    """Eigenvalues of a symmetric matrix, ascending, by cyclic rotations."""
    n, a = len(matrix), [list(row) for row in matrix]
    for _ in range(60):
        off = math.fsum(a[i][j] ** 2 for i in range(n) for j in range(n) if i != j)
        if off < 1e-32 * math.fsum(a[i][i] ** 2 for i in range(n)):
            break
        for p in range(n - 1):
            for q in range(p + 1, n):
                if a[p][q] == 0:
                    continue
                theta = (a[q][q] - a[p][p]) / (2 * a[p][q])
                t = math.copysign(1.0, theta) / (abs(theta) + math.hypot(1.0, theta))
                c = 1 / math.hypot(1.0, t)
                for row in a:
                    row[p], row[q] = c * row[p] - t * c * row[q], t * c * row[p] + c * row[q]
                a[p], a[q] = (
                    [c * x - t * c * y for x, y in zip(a[p], a[q], strict=True)],
                    [t * c * x + c * y for x, y in zip(a[p], a[q], strict=True)],
                )
    return sorted(a[i][i] for i in range(n))


class GeoClip(Transcription):
    """GeoClip (Gilani et al. 2025, arXiv 2506.06549): w = M (g - a), clipped to 1, and back.

    M = (1 / sum sqrt(lambda))^(1/2) Lambda^(-1/4) U^T, from U and from lambda clamped to [h_1, h_2]. From the released
    gradient g:

    - Algorithm 1 (``rank`` 0): Sigma <- beta_2 Sigma + (1 - beta_2) B (g - a_t)(g - a_t)^T about the *old* mean
      (equations 18 and 20, line 11), then a_(t+1) = beta_1 a_t + (1 - beta_1) g.
    - Algorithm 3 (rank k): a_(t+1) first; then z = g - a_(t+1), about the *new* mean, enters the streaming PCA. Here
      that is the k leading eigenvectors of beta_3 U Lambda U^T + (1 - beta_3) B z z^T.

    B is the mini-batch factor of equation 20; listings are for batches of one, where it is 1. The first M is that of
    Sigma_0 = lam0 I by the formula above (the listing begins with M_0 = I beside Sigma_0 = I).

    ``explore`` and ``outer`` are the library's own: a share of the budget releases (I - U U^T)(g - a), clipped to
    ``outer``, which is added to z.

    Equal eigenvalues leave eigenvectors open, so ``adopt`` takes the library's, after it has checked that they are
    eigenvectors of this covariance. A random start is taken over by ``begin``, which checks that it is orthonormal.
    """

    def __init__(
        self, *args: Any, rank: int = 0, explore: float = 0.0, b1: float = 0.99, b2: float = 0.99, h1: float = 0.01,
        h2: float = 1.0, start: float = 1.0, outer: float = 1.0, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **more)
        self.d, self.rank, self.explore, self.outer = sum(self.sizes), rank, explore, outer
        self.k = rank or self.d
        self.b1, self.b2 = b1, b2
        self.a = [0.0] * self.d
        lam0 = start**2 / self.k
        self.h1, self.h2 = h1 * lam0, h2 * lam0
        self.lam = [lam0] * self.k
        self.u = [[1.0 if i == j else 0.0 for j in range(self.k)] for i in range(self.d)]
        self.covariance = [[lam0 if i == j else 0.0 for j in range(self.d)] for i in range(self.d)]
        self.residual = 0.0

    def m(self) -> list[float]:
        total = math.fsum(math.sqrt(lam) for lam in self.lam)
        return [(1 / total) ** 0.5 * lam**-0.25 for lam in self.lam]

    def sums(self, rows: Blocks) -> Blocks:
        blocks = [[0.0] * self.k] + ([[0.0] * self.d] if self.explore else [])
        m = self.m()
        for row in rows:
            g = [value - a for value, a in zip(row, self.a, strict=True)]
            inside = [math.fsum(self.u[i][j] * g[i] for i in range(self.d)) for j in range(self.k)]
            parts = [clipped([one * value for one, value in zip(m, inside, strict=True)], 1.0)]
            if self.explore:
                rest = [g[i] - math.fsum(self.u[i][j] * inside[j] for j in range(self.k)) for i in range(self.d)]
                parts.append(clipped(rest, self.outer))
            for block, part in zip(blocks, parts, strict=True):
                for place, value in enumerate(part):
                    block[place] += value
        return blocks

    def deviations(self) -> list[float]:
        if not self.explore:
            return [self.z]
        return [self.z / math.sqrt(1 - self.explore), self.z * self.outer / math.sqrt(self.explore)]

    def gradient(self, out: Blocks) -> list[float]:
        scaled = [r / self.batch / one for r, one in zip(out[0], self.m(), strict=True)]
        return [
            float(np.float32(math.fsum(self.u[i][j] * scaled[j] for j in range(self.k)) + self.a[i]))
            for i in range(self.d)
        ]

    def update(self, out: Blocks, gradient: list[float]) -> None:
        new = [self.b1 * a + (1 - self.b1) * g for a, g in zip(self.a, gradient, strict=True)]
        centre = self.a if self.rank == 0 else new
        z = [g - c for g, c in zip(gradient, centre, strict=True)]
        if self.explore:
            z = [one + rest / self.batch for one, rest in zip(z, out[1], strict=True)]
        before = self.covariance
        if self.rank:
            before = [
                [math.fsum(self.lam[j] * self.u[p][j] * self.u[q][j] for j in range(self.k)) for q in range(self.d)]
                for p in range(self.d)
            ]
        self.covariance = [
            [self.b2 * before[p][q] + (1 - self.b2) * self.batch * z[p] * z[q] for q in range(self.d)]
            for p in range(self.d)
        ]
        self.a = new

    def begin(self, u: Blocks) -> None:
        """Take over the first directions, d rows of k numbers."""
        self.residual = max(self.residual, self.skewness(u))
        self.u = [list(row) for row in u]

    def skewness(self, u: Blocks) -> float:
        """The largest error of U^T U = I."""
        products = [[math.fsum(row[i] * row[j] for row in u) for j in range(self.k)] for i in range(self.k)]
        return max(abs(products[i][j] - (i == j)) for i in range(self.k) for j in range(self.k))

    def adopt(self, u: Blocks) -> None:
        """Check a basis (d rows of k numbers) against this covariance and take it, with this covariance's eigenvalues.

        ``residual`` keeps the largest |C v - lambda v| over the largest eigenvalue, and the largest error of U^T U = I.
        """
        values = jacobi(self.covariance)
        order = values if self.rank == 0 else values[::-1][: self.k]  # ascending, as eigh; descending, as a PCA
        for j in range(self.k):
            v = [row[j] for row in u]
            image = [math.fsum(c * one for c, one in zip(row, v, strict=True)) for row in self.covariance]
            error = norm([c - order[j] * one for c, one in zip(image, v, strict=True)])
            self.residual = max(self.residual, error / max(values[-1], 1e-300))
        self.begin(u)
        self.lam = [min(max(lam, self.h1), self.h2) for lam in order]

    def state(self) -> dict[str, Any]:
        return {"mean": list(self.a), "eigenvalues": list(self.lam)}
