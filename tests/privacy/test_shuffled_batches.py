"""Shuffled batches: the interval against brute force, where a run can be simulated whole, and against known points."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dptune.privacy.accounting.sampled_gaussian import gdp_delta, gdp_epsilon
from dptune.privacy.samplers.shuffled_batches import _Largest, _several_epochs, least_shuffled_epsilon


@pytest.mark.parametrize(
    ("noise", "batches", "delta", "least"),
    [(1.3521, 65, 7.424e-6, 2.35463), (0.5, 10_000, 1e-6, 10.9948), (0.393804, 1314, 1e-5, 13.4702)],
)
def test_known_points_of_one_epoch(noise: float, batches: int, delta: float, least: float) -> None:
    assert least_shuffled_epsilon(noise, batches, 1, delta) == pytest.approx(least, rel=5e-6)


def exact_delta(noise: float, epsilon: float, left_out: float = 0.0) -> float:
    """Delta of two batches, one epoch, by integration over the plane: P and Q are mixtures of two bumps each, and of a
    third where the unit is left out."""
    x = np.linspace(-9 * noise, 2 + 9 * noise, 3001)
    zero, one, two = (norm.pdf(x, mean, noise) for mean in (0.0, 1.0, 2.0))
    none, kept = left_out * np.outer(zero, zero), (1 - left_out) / 2
    mine = kept * (two[:, None] * zero + zero[:, None] * two) + none
    other = kept * (one[:, None] * zero + zero[:, None] * one) + none
    cell = (x[1] - x[0]) ** 2
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) * cell for a, b in ((mine, other), (other, mine)))


@pytest.mark.parametrize("noise", [0.6, 1.0, 2.5])
@pytest.mark.parametrize("delta", [1e-10, 1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("left_out", [0.0, 0.3])
def test_two_batches_lie_in_the_interval(noise: float, delta: float, left_out: float) -> None:
    """The truth of this data set is above "at least" and below "at most", and the event loses little of it."""
    least = least_shuffled_epsilon(noise, 2, 1, delta, left_out)
    assert least == 0 or exact_delta(noise, least, left_out) >= delta * (1 - 1e-3)
    assert exact_delta(noise, gdp_epsilon(1 / noise, delta), left_out) <= delta * (1 + 1e-3)
    if delta < 0.1:
        assert least > 0
        assert exact_delta(noise, 1.25 * least + 0.2, left_out) < delta


@pytest.mark.parametrize("delta", [1e-12, 1e-7, 1e-3, 0.05])
@pytest.mark.parametrize("left_out", [1e-6, 0.05, 0.4])
@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_one_batch_of_which_units_are_left_out_is_exact(noise: float, left_out: float, delta: float) -> None:
    """With one batch the entry is the whole release: its divergence, integrated over the line, equals delta."""
    least = least_shuffled_epsilon(noise, 1, 1, delta, left_out)
    x = np.linspace(-15 * noise, 2 + 15 * noise, 200_001)
    zero, one, two = (norm.pdf(x, mean, noise) for mean in (0.0, 1.0, 2.0))
    mine, other = ((1 - left_out) * unit + left_out * zero for unit in (two, one))
    gaps = (np.maximum(a - math.exp(least) * b, 0).sum() for a, b in ((mine, other), (other, mine)))
    truth = float(max(gaps)) * (x[1] - x[0])
    assert truth <= delta * (1 + 1e-3)
    assert least == 0 or truth >= delta * (1 - 1e-6)


@pytest.mark.parametrize(
    ("noise", "batches", "epochs", "delta", "left_out"),
    [
        (1.0, 5, 3, 0.01, 0.0),
        (0.7, 20, 2, 1e-3, 0.0),
        (2, 3, 9, 0.1, 0.0),
        (1.0, 5, 3, 0.01, 0.15),
        (0.8, 3, 4, 0.01, 0.3),
    ],
)
def test_simulated_epochs_diverge_as_much_as_is_said(
    noise: float, batches: int, epochs: int, delta: float, left_out: float
) -> None:
    """The divergence of this pair, E_P (1 - e^(epsilon - loss))_+, from 400,000 runs with their whole likelihood ratio.

    At "at least" it is not below delta, and a fifth above not far above it. A sound bound fails with a chance of 1e-6.
    """
    rng, runs = np.random.default_rng(5), 400_000
    x = noise * rng.standard_normal((runs, epochs, batches))
    x[..., 0] += 2 * (rng.random((runs, epochs)) >= left_out)  # by symmetry the unit's batch may be the first
    with_unit, zeroed = ((np.exp((2 * m * x - m * m) / (2 * noise**2))).mean(2) for m in (2, 1))
    both = (left_out + (1 - left_out) * one for one in (with_unit, zeroed))  # over the density without any unit
    losses = (np.log(next(both)) - np.log(next(both))).sum(1)

    def divergence(epsilon: float) -> tuple[float, float]:
        shown = np.maximum(-np.expm1(epsilon - losses), 0)
        return float(shown.mean()), 5 * float(shown.std()) / math.sqrt(runs)

    least = least_shuffled_epsilon(noise, batches, epochs, delta, left_out)
    mean, error = divergence(least)
    assert mean + error >= delta
    mean, error = divergence(1.2 * least + 0.2)
    assert mean - error <= delta


@pytest.mark.parametrize("delta", [1e-12, 1e-9, 1e-5, 1e-2, 0.1, 0.4])
@pytest.mark.parametrize(
    ("noise", "epochs"), [(0.2, 10), (0.8, 2), (1.0, 10), (1.3521, 10), (4.0, 200), (30.0, 10_000)]
)
def test_with_one_batch_it_is_gaussian_dp(noise: float, epochs: int, delta: float) -> None:
    """Every batch then holds all units, so that there is nothing to amplify."""
    truth = gdp_epsilon(math.sqrt(epochs) / noise, delta)
    slack = 2e-3 if epochs < 1000 else 0.2
    assert (1 - slack) * truth - 1e-4 <= least_shuffled_epsilon(noise, 1, epochs, delta) <= truth


def test_a_million_epochs_show_no_less_than_their_first() -> None:
    assert 100 < least_shuffled_epsilon(10.0, 1, 1_000_000, 0.4) <= gdp_epsilon(100.0, 0.4)


@pytest.mark.parametrize(("noise", "batches", "delta"), [(1.3521, 65, 7.424e-6), (0.5, 300, 1e-9), (0.9, 9, 1e-3)])
def test_the_composed_losses_of_one_epoch_agree_with_its_best_event(noise: float, batches: int, delta: float) -> None:
    one = least_shuffled_epsilon(noise, batches, 1, delta)
    assert one * 0.9995 <= _several_epochs(_Largest(noise, batches, 0.0), 1, delta) <= one * (1 + 1e-7)


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(st.floats(0.4, 5.0), st.integers(1, 3000), st.integers(1, 3), st.floats(-12, -1))
def test_it_grows_with_epochs_and_falls_with_noise_and_delta(
    noise: float, batches: int, epochs: int, exponent: float
) -> None:
    delta = 10**exponent
    least = least_shuffled_epsilon(noise, batches, epochs, delta)
    assert 0 <= least <= gdp_epsilon(math.sqrt(epochs) / noise, delta) + 1e-9
    # Grids differ, by 1e-4 of an epsilon above 1 and less than 1e-4 below.
    room = 2e-4 * max(least, 1.0)
    assert least_shuffled_epsilon(noise * 1.1, batches, epochs, delta) <= least + room
    assert least_shuffled_epsilon(noise, batches, epochs, min(2 * delta, 0.5)) <= least + room
    assert least_shuffled_epsilon(noise, batches, epochs + 1, delta) >= least - room


def test_less_than_an_epoch_shows_nothing() -> None:
    assert least_shuffled_epsilon(1.0, 10, 0, 1e-5) == 0.0
    assert gdp_delta(1.0, 0.0) > 0.3
