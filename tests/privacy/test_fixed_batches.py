"""Fixed batches: binomial tails against sums, and sampling without replacement against losses multiplied out."""

from __future__ import annotations

import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import pld_epsilon
from dptune.privacy.release import Release
from dptune.privacy.samplers.sampler import Sampler
from dptune.privacy.samplers.sampler_bounds import chance_of_a_cut, sampled_epsilon
from tests.privacy.loss_truth import true_delta

Array = NDArray[np.float64]


def fixed(rate: float, noise: float, steps: int, delta: float) -> float:
    return sampled_epsilon(Counter({Release(rate, noise, sampler=Sampler("fixed_size")): steps}), delta)


def truncated(rate: float, noise: float, steps: int, delta: float, units: int, most: int) -> float:
    sampler = Sampler("truncated_poisson", units=units, max_batch=most)
    return sampled_epsilon(Counter({Release(rate, noise, sampler=sampler): steps}), delta)


def symmetric_bounds(rate: float, noise: float, steps: int, delta: float, width: float) -> tuple[float, float]:
    """A lower and an upper bound of the symmetric pair's epsilon: losses rounded down, and up, multiplied term by term.

    Above 0 a loss is above t with the mixture's chance; below -t it is with the chance of the base alone.
    """
    places = np.arange(math.ceil((4 / noise**2 * 0.5 + 2 * 9 / noise) / width) + 1)
    outcomes = 1 + noise**2 / 2 * np.log1p(np.expm1(width * places) / rate)
    base, mixed = ndtr(-outcomes / noise), (1 - rate) * ndtr(-outcomes / noise) + rate * ndtr((2 - outcomes) / noise)
    above, below = mixed[:-1] - mixed[1:], base[:-1] - base[1:]  # of losses between two places, and minus two
    size, found = len(above), []
    for up in (0, 1):
        law = np.zeros(2 * size + 1)
        law[size + up : 2 * size + up] += above
        law[size - 1 + up - np.arange(size)] += below
        law[size] += 1 - mixed[0] - base[0]
        law[0 if not up else 1] += base[-1]
        total, beyond = np.ones(1), 0.0
        for _ in range(steps):
            total, beyond = np.convolve(total, law), beyond + up * float(mixed[-1])
        losses = width * (np.arange(len(total)) - steps * size)

        def excess(epsilon: float, losses: Array = losses, total: Array = total, beyond: float = beyond) -> float:
            kept = losses > epsilon
            return float(total[kept] @ -np.expm1(epsilon - losses[kept])) + beyond - delta

        found.append(brentq(excess, 0.0, losses[-1], xtol=1e-10) if excess(0.0) > 0 else 0.0)
    return found[0], found[1]


@pytest.mark.parametrize("delta", [1e-12, 1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.1, 2.0, 1), (0.5, 3.0, 3), (0.02, 1.5, 4), (0.95, 8.0, 2)])
def test_replacing_a_unit_lies_between_two_roundings(rate: float, noise: float, steps: int, delta: float) -> None:
    low, high = symmetric_bounds(rate, noise, steps, delta, 1e-3)
    found = fixed(rate, noise, steps, delta)
    assert low <= found * (1 + 1e-6)
    assert found <= 1.005 * high + 1e-3


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 1e-2])
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.05, 2.0, 300), (0.01, 1.4, 2000), (0.3, 6.0, 100)])
def test_it_costs_at_least_what_known_data_show(rate: float, noise: float, steps: int, delta: float) -> None:
    """Add/remove at a fixed batch is Poisson sampling at twice the sensitivity, and other gradients of -1 reach it."""
    found = fixed(rate, noise, steps, delta)
    assert true_delta([(rate, noise / 2, steps)], found, delta / 1000) <= delta
    assert found >= pld_epsilon(Counter({Release(rate, noise / 2): steps}), delta) * (1 - 2e-3)


@pytest.mark.parametrize(("rate", "noise"), [(0.3, 1.0), (0.05, 0.7), (0.6, 2.0)])
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_it_costs_at_least_what_opposite_gradients_show(rate: float, noise: float, delta: float) -> None:
    """Two steps, other gradients 0, a unit of +1 for one of -1 (Lebeda et al. 2024), by a sum over the plane."""
    x = np.linspace(-1 - 9 * noise, 1 + 9 * noise, 1601)
    density = [(np.exp(-((x - m) ** 2) / (2 * noise**2)) / noise / math.sqrt(2 * math.pi)) for m in (-1, 0, 1)]
    mine, other = (1 - rate) * density[1] + rate * density[2], (1 - rate) * density[1] + rate * density[0]
    ratio = math.exp(fixed(rate, noise, 2, delta))
    gap = np.maximum(np.outer(mine, mine) - ratio * np.outer(other, other), 0)
    assert float(gap.sum()) * (x[1] - x[0]) ** 2 <= delta * (1 + 1e-3)


@pytest.mark.parametrize(
    ("units", "rate", "most"), [(50, 0.1, 15), (1000, 0.01, 40), (66_013, 0.0155, 1300), (10**9, 1e-7, 250)]
)
def test_the_chance_of_a_cut_is_a_binomial_tail(units: int, rate: float, most: int) -> None:
    last = min(units, most + 3000)
    with mpmath.workdps(40):
        p = mpmath.mpf(rate)
        terms = (mpmath.binomial(units, k) * p**k * (1 - p) ** (units - k) for k in range(most, last + 1))
        tail = mpmath.fsum(terms)
    assert float(tail) <= chance_of_a_cut(units, rate, most, 1) <= float(tail) * (1 + 1e-5) + 1e-299
    assert chance_of_a_cut(units, rate, most, 7) <= 7 * chance_of_a_cut(units, rate, most, 1) * (1 + 1e-9)


@pytest.mark.parametrize("delta", [1e-11, 1e-6, 1e-2])
def test_a_batch_that_is_hardly_ever_cut_costs_what_poisson_does(delta: float) -> None:
    poisson = pld_epsilon(Counter({Release(0.01, 1.0): 500}), delta)
    assert truncated(0.01, 1.0, 500, delta, 10_000, 250) == pytest.approx(poisson, rel=1e-3)
    assert truncated(0.01, 1.0, 500, delta, 10_000, 250) >= poisson * (1 - 1e-9)


def test_cuts_are_taken_from_delta() -> None:
    cut = chance_of_a_cut(10_000, 0.01, 155, 500)
    assert 1e-6 < cut < 1e-4
    assert truncated(0.01, 1.0, 500, 1.5 * cut, 10_000, 155) == pytest.approx(
        pld_epsilon(Counter({Release(0.01, 1.0): 500}), 0.5 * cut), rel=1e-9
    )
    with pytest.raises(ConfigError, match=r"max_batch: a batch is cut to 155 .* Fix: use (\d+) or more") as refused:
        truncated(0.01, 1.0, 500, cut / 2, 10_000, 155)
    advised = int(str(refused.value).split("use ")[1].split()[0])
    assert (
        chance_of_a_cut(10_000, 0.01, advised, 500) <= 1e-3 * cut / 2 < chance_of_a_cut(10_000, 0.01, advised - 1, 500)
    )


def test_two_units_and_a_batch_of_one_by_hand() -> None:
    """A cut batch with its exact law: two units, coins of 1/2, one place. Delta by integration over the release."""
    noise, x = 1.0, np.linspace(-12, 13, 200_001)
    density = [np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (-1, 0, 1)]
    alone = (density[1] + density[0]) / 2  # the other unit, whose gradient is -1
    both = density[1] / 4 + density[2] / 4 + density[0] / 4 + (density[2] + density[0]) / 8
    for epsilon in (0.2, 0.5, 1.0):
        step = x[1] - x[0]
        gaps = (np.maximum(a - math.exp(epsilon) * b, 0).sum() * step for a, b in ((both, alone), (alone, both)))
        delta = float(max(gaps)) * 0.999
        if chance_of_a_cut(2, 0.5, 1, 1) < delta:
            assert truncated(0.5, noise, 1, delta, 2, 1) >= epsilon
        assert chance_of_a_cut(1, 0.5, 1, 1) == pytest.approx(0.5)
