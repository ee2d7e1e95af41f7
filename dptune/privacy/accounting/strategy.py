"""Strategies of correlated noise: the banded Toeplitz matrix C, its column norm, and the noise that it leaves in sums.

A run of T rows (charged releases) with coefficients c = (c_0 .. c_(b-1)) adds to row r the noise sigma w_r, where w
solves C w = z for fresh standard normal z, and C[r, r-i] = c_i: lower triangular, Toeplitz, b bands. Later rows take
back much of the noise of earlier ones, so that little of it stays in the sum of all rows, which is where it reaches
the weights. Units are dealt into b groups, and a unit of group j can be drawn in rows r with r mod b = j alone.

**What it costs.** With q the chance of a unit in an ordinary run, a unit is drawn in each row of its own group with
probability p = b q. Let the sums move by at most 1 when one unit is drawn or not, and let n be the norm of c. Then the
rows are dominated, about one unit of group j, by k_j = ceil((T - j) / b) Poisson-sampled Gaussian releases of rate p
and noise multiplier sigma / n. (Theorem 4 of Choquette-Choo et al. 2023, arXiv 2306.08153, has this form.)

Proof. Let x_r be row r. Decode y_r = sum_i c_i x_(r-i), of the rows so far: as c_0 > 0, the x up to r and the y up to r
are the same information. Given all earlier rows and the coins of all other units, y_r is a known vector, plus
sigma z_r, plus c_i g if the unit was drawn i rows ago, where g is its clipped contribution. g was fixed before that
row, from public weights, and has norm at most 1. The unit's visits are b rows apart and C has b bands, so at most one
visit reaches a row: the b rows from a visit on are one block, and blocks do not overlap. Within a block one coin
decides whether the means shift by (c_0 g, c_1 g, ..), a vector of norm at most n; so whatever came before, the block is
dominated by one Poisson-sampled Gaussian. Dominating pairs compose adaptively (Zhu, Dong and Wang 2022), and the unit
has k_j blocks.

Of the deal into groups the proof needs one thing: that no other unit's group hangs on this unit, or the known vector is
another one without it. So a unit's group is a hash of its own key (``training.privacy_units``). Groups may be known,
and of any sizes: p, sigma and what divides the sums are the same for all.

Nothing above needs g to be independent of earlier rows, T to be known, or b to divide T. Where a process dies, the
recursion begins again with no past noise: C is then block diagonal, still b-banded, and each of its columns is c or c
cut short, of norm at most n. When it dies may depend on releases: a cut block is the whole one, of which the last rows
are not shown. So a resumed run costs what its charged rows cost, wherever it broke.

Everything here is public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError

#: The noise that a strategy is chosen by: in recent steps (what the weights still hold), in the mean of all sums so
#: far, or in the sum of all steps.
Objective = Literal["recent", "mean", "last"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
#: Steps after which training has mended all but a third (1/e) of an error in the weights, where nobody knows better.
WINDOW = 100
#: Coefficients are kept to this many digits after the point, relative to the first. Another machine's last bits of the
#: optimiser then give the same strategy, which a resumed run must have.
_DIGITS = 6
_MOST_BANDS = 4096
#: Rows after which the deviation of w is as good as that of all later ones.
_SETTLED = 4096


def check_strategy(coefficients: Sequence[float]) -> None:
    """Raise ConfigError unless c_0 > c_1 >= .. >= c_(b-1) >= 0, all finite, with at least two bands.

    The zeros of sum c_i x^i then lie outside the unit disc (Enestrom and Kakeya), so the recursion does not grow. The
    guarantee needs c_0 > 0 alone.
    """
    if not 2 <= len(coefficients) <= _MOST_BANDS:
        problem = f"holds {len(coefficients)} numbers, and must hold 2 to {_MOST_BANDS}"
        raise ConfigError(
            "coefficients", problem, fix="give one number for each band; independent noise takes no coefficients"
        )
    if not all(math.isfinite(one) and one >= 0 for one in coefficients):
        raise ConfigError("coefficients", "hold a negative or infinite number", fix="use square_root or optimised")
    falls = all(left >= right for left, right in pairwise(coefficients))
    if not (falls and coefficients[0] > coefficients[1]):
        raise ConfigError("coefficients", "do not decrease", fix="use square_root or optimised")


def column_norm(coefficients: Sequence[float]) -> float:
    """The l2 norm of c: by how much one visit of a unit shifts its block of decoded rows."""
    return math.sqrt(math.fsum(one * one for one in coefficients)) if coefficients else 1.0


def square_root(bands: int) -> tuple[float, ...]:
    """The first ``bands`` coefficients of the root of the prefix-sum matrix, of norm 1.

    c_i = c_(i-1) (2 i - 1) / (2 i) (Fichtenberger, Henzinger and Upadhyay 2022, arXiv 2202.11205). Its error is within
    7 % of the optimum for up to 11 rows a band.
    """
    ratios = [1.0]
    for place in range(1, _checked(bands)):
        ratios.append(ratios[-1] * (2 * place - 1) / (2 * place))
    return _normalised(np.array(ratios))


@lru_cache(maxsize=256)
def optimised(bands: int, steps: int, objective: Objective = "mean", window: float = WINDOW) -> tuple[float, ...]:
    """The coefficients of norm 1 with the least ``error`` over ``steps`` rows.

    Minimises log(error^2 of c) + log(|c|^2) with c_0 = 1 by L-BFGS from ``square_root``; the gradient is the adjoint of
    the recursion. ``window`` is that of ``error``.

    Raises: ConfigError for bands below 1 or above the steps.
    """
    if _checked(bands) > steps:
        raise ConfigError("bands", f"{bands} are more than the {steps} steps", fix=f"use at most {steps}")
    if bands == 1:
        return (1.0,)
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    workload, weights = _workload(steps, objective, window)

    def cost(tail: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        coefficients = np.concatenate([[1.0], tail])
        left = lfilter([1.0], coefficients, workload)
        total, norm = float(np.sum(weights * left**2)), float(coefficients @ coefficients)
        adjoint = lfilter([1.0], coefficients, (2 * weights * left)[::-1])[::-1]
        slope = np.array([-(adjoint[place:] @ left[:-place]) for place in range(1, bands)])
        return math.log(total) + math.log(norm), slope / total + 2 * tail / norm

    start = np.array(square_root(bands))
    found = minimize(
        cost,
        start[1:] / start[0],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * (bands - 1),
        options={"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-10},
    ).x
    # An optimum falls by itself; where the search left a last digit that does not, it is cut.
    return _normalised(np.minimum.accumulate(np.concatenate([[1.0], found])))


def error(coefficients: Sequence[float], steps: int, objective: Objective = "mean", window: float = WINDOW) -> float:
    """Root of the noise variance that the objective names, for a noise multiplier of 1; () is independent noise.

    With ``mean`` it is the root mean square, over the sums of the first rows, of the noise in them; with ``last`` the
    standard deviation of the noise in the sum of all rows; with ``recent`` that in the last weights of SGD at rate 1 on
    a loss that takes back a share of 1 / ``window`` of an error in each step.
    """
    from scipy.signal import lfilter

    workload, weights = _workload(steps, objective, window)
    left = lfilter([1.0], list(coefficients) or [1.0], workload)
    return float(np.sqrt(np.sum(weights * left**2)))


def relative_error(
    coefficients: Sequence[float], steps: int, objective: Objective = "mean", window: float = WINDOW
) -> float:
    """``error`` over that of independent noise of the same multiplier: below 1 is a gain."""
    return error(coefficients, steps, objective, window) / error((), steps, objective, window)


def inverse(coefficients: Sequence[float], rows: int) -> NDArray[np.float64]:
    """(rows,) first column of the inverse of C, from which all of it follows: w_r = sum_i inverse[i] z_(r-i)."""
    from scipy.signal import lfilter

    return np.asarray(lfilter([1.0], list(coefficients), np.eye(1, rows)[0]))


def row_deviations(coefficients: Sequence[float], rows: int) -> NDArray[np.float64]:
    """(rows,) standard deviation of w in each row after a (re)start of the recursion; all above 1 / norm."""
    return np.asarray(np.sqrt(np.cumsum(inverse(coefficients, rows) ** 2)))


def row_deviation(coefficients: Sequence[float], before: int) -> float:
    """Standard deviation of w in one row, ``before`` rows after a (re)start; that of row 4,096 serves all later."""
    return float(row_deviations(coefficients, min(before, _SETTLED) + 1)[-1])


def visits(steps: int, bands: int) -> tuple[int, ...]:
    """(bands,) rows of each group among the first ``steps``: k_j = ceil((steps - j) / bands), or 0."""
    return tuple(max(0, -(-(steps - group) // bands)) for group in range(bands))


def _workload(steps: int, objective: Objective, window: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(steps,) what C^{-1} is applied to, and the (steps,) weights of the squares of the result."""
    if objective not in OBJECTIVES:
        raise ConfigError("objective", f"unknown {objective!r}", fix=f"use {' or '.join(OBJECTIVES)}")
    if steps < 1:
        raise ConfigError("steps", f"{steps} is below 1", fix="use 1 or more")
    if objective == "mean":
        return np.ones(steps), 1 - np.arange(steps) / steps
    if objective == "last":
        return np.ones(steps), np.ones(steps)
    if not 1 <= window < math.inf:
        raise ConfigError("window", f"{window} is not a number of steps, 1 or more", fix=f"use {WINDOW}, say")
    return np.asarray((1 - 1 / window) ** np.arange(steps)), np.ones(steps)


def _checked(bands: int) -> int:
    if not 1 <= bands <= _MOST_BANDS:
        raise ConfigError("bands", f"{bands} is not 1 to {_MOST_BANDS}", fix="use 8, say, or auto")
    return bands


def _normalised(ratios: NDArray[np.float64]) -> tuple[float, ...]:
    kept = [round(float(one), _DIGITS) for one in ratios]
    norm = column_norm(kept)
    return tuple(one / norm for one in kept)
