"""Strategies of correlated noise: published closed forms, the optimum, and the noise that they leave in sums."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import toeplitz

from dptune.core.errors import ConfigError
from dptune.privacy.accounting.strategy import (
    check_strategy,
    column_norm,
    error,
    inverse,
    optimised,
    relative_error,
    row_deviations,
    square_root,
    visits,
)

REFERENCE = optimised(8, 72)
TABLE = [(8, 72), (4, 102), (16, 172), (43, 172), (2, 72), (64, 72)]


def matrix(strategy: tuple[float, ...], rows: int) -> np.ndarray:
    column = np.zeros(rows)
    column[: min(rows, len(strategy))] = strategy[:rows]
    return toeplitz(column, np.zeros(rows))


def test_the_reference_strategy_and_its_inverse() -> None:
    """Of an independent optimiser (jax_privacy's), to the digits that were kept."""
    assert (
        pytest.approx((0.66805, 0.39762, 0.32602, 0.28652, 0.25862, 0.23603, 0.21574, 0.19518), abs=6e-6) == REFERENCE
    )
    expected = (1.49690, -0.89094, -0.20022, -0.08804, -0.04725, -0.02700, -0.01423)
    assert inverse(REFERENCE, 7) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("bands", "steps", "last", "mean"),
    [(8, 72, 0.42539, 0.45932), (16, 172, 0.31184, 0.34018), (16, 1145, 0.26920, 0.27814), (64, 1145, 0.161, 0.176)],
)
def test_the_noise_that_is_left_is_as_published(bands: int, steps: int, last: float, mean: float) -> None:
    strategy = optimised(bands, steps)
    digits = 1e-5 if last != 0.161 else 5e-4
    assert relative_error(strategy, steps, "last") == pytest.approx(last, abs=digits)
    assert relative_error(strategy, steps, "mean") == pytest.approx(mean, abs=digits)


def test_a_loss_that_contracts_has_another_optimum() -> None:
    strategy = optimised(8, 72, "recent", 24.0)
    expected = (0.76030, 0.39258, 0.29479, 0.24251, 0.20760, 0.18150, 0.16052, 0.14252)
    assert strategy == pytest.approx(expected, abs=1e-5)
    assert relative_error(strategy, 72, "last") == pytest.approx(0.44705, abs=1e-5)
    assert relative_error(strategy, 72, "mean") == pytest.approx(0.47209, abs=1e-5)
    assert error(strategy, 72, "recent", 24.0) < error(REFERENCE, 72, "recent", 24.0)


def test_the_closed_form() -> None:
    assert square_root(4) == pytest.approx((0.81971, 0.40985, 0.30739, 0.25616), abs=1e-5)
    assert inverse(square_root(4), 5) == pytest.approx((1.21995, -0.60998, -0.15249, -0.07625, 0.28593), abs=1e-5)
    assert square_root(1) == (1.0,)


def test_the_law_of_the_reference_noise() -> None:
    """Deviation of single rows, and of the sums of all rows so far."""
    assert row_deviations(REFERENCE, 72)[[0, 1, 7, 71]] == pytest.approx((1.49690, 1.74198, 1.75656, 1.80947), abs=1e-5)
    sums = [error(REFERENCE, rows, "last") for rows in (1, 2, 8, 36, 72)]
    assert sums == pytest.approx((1.49690, 1.61489, 1.76340, 2.76350, 3.60957), abs=2e-5)


@pytest.mark.parametrize(("bands", "steps"), TABLE)
def test_an_optimum_has_norm_1_falls_and_is_no_worse_than_the_closed_form(bands: int, steps: int) -> None:
    strategy = optimised(bands, steps)
    check_strategy(strategy)
    assert column_norm(strategy) == pytest.approx(1, abs=1e-12)
    assert error(strategy, steps) <= error(square_root(bands), steps)


@pytest.mark.parametrize(("bands", "steps"), TABLE)
def test_errors_are_those_of_the_matrix(bands: int, steps: int) -> None:
    """``error`` filters; here the matrix is written out and inverted."""
    strategy = optimised(bands, steps)
    left = np.linalg.inv(matrix(strategy, steps))
    sums = np.tril(np.ones((steps, steps))) @ left
    assert error(strategy, steps, "last") == pytest.approx(np.linalg.norm(sums[-1]), rel=1e-9)
    assert error(strategy, steps, "mean") == pytest.approx(np.linalg.norm(sums) / steps**0.5, rel=1e-9)
    weights = (1 - 3 / steps) ** np.arange(steps)[::-1]
    assert error(strategy, steps, "recent", steps / 3) == pytest.approx(np.linalg.norm(weights @ left), rel=1e-9)
    assert (
        np.abs(matrix(strategy, steps) @ toeplitz(inverse(strategy, steps), np.zeros(steps)) - np.eye(steps)).max()
        < 1e-12
    )


def test_the_optimum_is_one() -> None:
    """No small step from it is better by more than its last digits are worth."""
    rng, best = np.random.default_rng(0), error(REFERENCE, 72)
    for _ in range(200):
        moved = np.array(REFERENCE) + 1e-3 * rng.standard_normal(8)
        assert error(tuple(moved / np.linalg.norm(moved)), 72) > best * (1 - 1e-7)


def test_visits_are_the_rows_of_each_group() -> None:
    for steps, bands in ((72, 8), (73, 8), (5, 8), (64, 1), (0, 3)):
        counted = np.bincount(np.arange(steps) % bands, minlength=bands)
        assert visits(steps, bands) == tuple(counted)


@pytest.mark.parametrize(
    "wrong", [(), (1.0,), (0.0, 0.0), (0.5, 0.5), (0.5, 0.6), (0.8, -0.1), (0.8, float("nan")), (float("inf"), 0.1)]
)
def test_what_is_no_strategy_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="coefficients"):
        check_strategy(wrong)


@pytest.mark.parametrize(("bands", "steps"), [(0, 5), (-1, 5), (6, 5), (5000, 9000)])
def test_numbers_of_bands_that_cannot_be(bands: int, steps: int) -> None:
    with pytest.raises(ConfigError, match="bands"):
        optimised(bands, steps)
