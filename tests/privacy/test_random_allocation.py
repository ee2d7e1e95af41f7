"""Random allocation against integrals over the outcomes of two and three bins, and against simulated epochs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from dptune.privacy.accounting.composed_losses import grid_epsilon
from dptune.privacy.accounting.sampled_gaussian import gdp_epsilon
from dptune.privacy.samplers import random_allocation
from dptune.privacy.samplers.random_allocation import allocation_epsilon

Array = NDArray[np.float64]


def expected_excess(known: Array, bins: int, noise: float, level: float, sign: int) -> Array:
    """E (sign (L - level))_+ over the last of ``bins`` terms, given the sum of the others: a call or a put."""
    strike = np.maximum(bins * level - known, 1e-300)
    below = -np.log(strike) * noise + 1 / (2 * noise)
    call = ndtr(below) - strike * ndtr(below - 1 / noise)
    put = strike * ndtr(1 / noise - below) - ndtr(-below)
    certain = known + 1 - bins * level
    return (
        np.where(known < bins * level, np.maximum(call if sign > 0 else put, 0), np.maximum(sign * certain, 0)) / bins
    )


def exact_deltas(noise: float, bins: int, epsilon: float) -> tuple[float, float]:
    """Delta of one epoch with two or three bins, by removing and by adding: all terms but the last by quadrature."""
    x = np.linspace(-9, 9 + 1 / noise, 6001 if bins == 2 else 801)
    weight = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    term = np.exp(x / noise - 1 / (2 * noise**2))
    known, weights = (term, weight) if bins == 2 else (term[:, None] + term, weight[:, None] * weight)
    level = math.exp(epsilon)
    remove = float((weights * expected_excess(known, bins, noise, level, 1)).sum())
    return remove, level * float((weights * expected_excess(known, bins, noise, 1 / level, -1)).sum())


def exact_delta(noise: float, bins: int, epsilon: float) -> float:
    return max(exact_deltas(noise, bins, epsilon))


@pytest.mark.parametrize(("bins", "noise"), [(2, 0.5), (2, 1.0), (2, 3.0), (3, 0.8)])
def test_it_is_never_below_the_truth_and_near_it(bins: int, noise: float) -> None:
    for exponent in (-12, -9, -6, -4, -2, -1) if bins == 2 else (-10, -4, -1):
        delta = 10.0**exponent
        if exact_delta(noise, bins, 0.0) <= 1.05 * delta:
            continue
        truth = brentq(lambda e, d=delta: math.log(exact_delta(noise, bins, e) / d), 0.0, 1.5 / noise**2 + 12 / noise)
        assert truth * (1 - 2e-5) <= allocation_epsilon(noise, bins, 1, delta) <= 1.01 * truth + 1e-3


@pytest.mark.parametrize(("noise", "delta"), [(1.2, 1e-9), (0.7, 1e-3), (2.0, 1e-12), (2.0, 0.1)])
def test_two_epochs_of_two_bins_are_near_an_integral_over_all_their_terms(noise: float, delta: float) -> None:
    """E (L M - e^epsilon)_+ over the first epoch's L by a grid of its terms; over M, given L, as for one epoch."""
    x = np.linspace(-9, 9 + 1 / noise, 601)
    weight = np.exp(-(x**2) / 2) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    term = np.exp(x / noise - 1 / (2 * noise**2))
    first, weights = np.log((term[:, None] + term) / 2), weight[:, None] * weight
    levels = np.linspace(-8, 16, 1000)
    calls = np.log([exact_deltas(noise, 2, level)[0] + 1e-300 for level in levels])

    def remove(epsilon: float) -> float:
        wanted = epsilon - first
        rest = np.where(wanted < levels[0], -np.expm1(wanted), np.exp(np.interp(wanted, levels, calls)))
        return float((weights * np.exp(first) * rest).sum())

    found = allocation_epsilon(noise, 2, 2, delta)
    truth = brentq(lambda e: math.log(remove(e) / delta), 0.0, 14.0)
    assert truth * (1 - 1e-4) <= found <= 1.01 * truth + 1e-3


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-3, 0.02])
def test_each_direction_is_near_its_own_truth(noise: float, delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing has been the dearer in all that was tried, so that adding never shows in the result."""
    found: list[float] = []

    def recorded(*given: Any) -> float:
        found.append(grid_epsilon(*given))
        return found[-1]

    monkeypatch.setattr(random_allocation, "grid_epsilon", recorded)
    random_allocation.allocation_epsilon.__wrapped__(noise, 2, 1, delta)
    for direction in (0, 1):
        truth = brentq(
            lambda e, side=direction: exact_deltas(noise, 2, e)[side] - delta, 0.0, 1.5 / noise**2 + 12 / noise
        )
        assert truth * (1 - 2e-5) <= found[direction - 2] <= 1.01 * truth + 1e-3


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
@pytest.mark.parametrize(("noise", "epochs"), [(0.6, 1), (1.5, 4), (6.0, 90)])
def test_with_one_bin_it_is_gaussian_dp(noise: float, epochs: int, delta: float) -> None:
    truth = gdp_epsilon(math.sqrt(epochs) / noise, delta)
    assert truth <= allocation_epsilon(noise, 1, epochs, delta) <= 1.005 * truth + 1e-3


@pytest.mark.one_case("1.0-10-1-1e-05", "0.6-37-2-0.0001")
@pytest.mark.parametrize(
    ("noise", "bins", "epochs", "delta"),
    [
        (1.0, 10, 1, 1e-5),
        (0.7, 65, 1, 1e-3),
        (0.6, 37, 2, 1e-4),
        (2.0, 100, 5, 1e-2),
        pytest.param(0.4, 500, 1, 1e-6, marks=pytest.mark.long),
    ],
)
def test_simulated_epochs_diverge_as_much_as_is_said(noise: float, bins: int, epochs: int, delta: float) -> None:
    """E_P (1 - e^(epsilon - loss))_+ from 200,000 runs, half of them with means so large that many count.

    A sound bound fails with a chance of 1e-6; one that is three percent too high fails as well.
    """
    rng, runs = np.random.default_rng(11), 200_000
    epsilon = allocation_epsilon(noise, bins, epochs, delta)
    shift = max(0.0, 0.5 + noise**2 * (epsilon / epochs + math.log(bins)) - 1) if epsilon > 0.5 else 0.0
    losses, log_odds = np.zeros(runs), np.zeros(runs)
    drawn = shift * (np.arange(runs) % 2)
    for _ in range(epochs):
        x = noise * rng.standard_normal((runs, bins))
        x[:, 0] += drawn
        log_odds += shift * (2 * x[:, 0] - shift) / (2 * noise**2)
        x[:, 0] += 1
        losses += np.log(np.exp((2 * x - 1) / (2 * noise**2)).mean(1))

    def divergence(at: float) -> tuple[float, float]:
        shown = 2 / (1 + np.exp(log_odds)) * np.maximum(-np.expm1(at - losses), 0)
        return float(shown.mean()), 5 * float(shown.std()) / math.sqrt(runs)

    mean, error = divergence(epsilon)
    assert mean - error <= delta
    assert error < 0.3 * delta
    mean, error = divergence(0.97 * epsilon - 2e-3)
    assert mean + error >= delta


@pytest.mark.long
@settings(deadline=None, max_examples=8)
@given(st.floats(0.5, 4.0), st.integers(1, 300), st.integers(1, 4), st.floats(-10, -1))
def test_it_falls_with_noise_bins_and_delta_and_grows_with_epochs(
    noise: float, bins: int, epochs: int, exponent: float
) -> None:
    delta = 10**exponent
    epsilon = allocation_epsilon(noise, bins, epochs, delta)
    assert epsilon <= 1.005 * gdp_epsilon(math.sqrt(epochs) / noise, delta) + 1e-3
    room = 4e-3 * epsilon + 1e-3  # the share by which two grids may differ
    assert allocation_epsilon(1.2 * noise, bins, epochs, delta) <= epsilon + room
    assert allocation_epsilon(noise, 2 * bins, epochs, delta) <= epsilon + room
    assert allocation_epsilon(noise, bins, epochs, 3 * delta) <= epsilon + room
    assert allocation_epsilon(noise, bins, epochs + 1, delta) >= epsilon - room
