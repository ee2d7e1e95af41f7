"""The price of a search: reference numbers, attacks by enumeration of the mechanism, and its properties."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr

from dptune.core.errors import ConfigError
from dptune.mechanisms.planning import Schedule, calibrated_candidate
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.accounting.loss_profile import GRID, Profile, average, gaussian_profile, largest, profile_of
from dptune.privacy.release import Composition, Release
from dptune.privacy.selection import (
    price_selection,
    pure_selection_epsilon,
    renyi_selection_epsilon,
    selection_delta,
    selection_epsilon,
    shifts_of,
)
from dptune.privacy.selection_law import SelectionLaw

Array = NDArray[np.float64]
DELTA = 1e-5
GEOMETRIC = SelectionLaw.of(10, 1, 400)


def uncapped(candidates: float, shape: float) -> SelectionLaw:
    return SelectionLaw.of(candidates, shape, 100 if shape == math.inf else 1000)


def run_of(rate: float, noise: float, steps: int) -> Composition:
    return Counter({Release(rate, noise): steps})


def profile_of_pair(p: Array, q: Array) -> Profile:
    """The exact profile of two discrete distributions."""
    exp = np.exp(GRID)[:, None]
    return Profile(np.maximum(p - exp * q, 0).sum(1), np.maximum(q - exp * p, 0).sum(1))


def winner(p: Array, order: NDArray[np.int64], law: SelectionLaw, ties: int = 30) -> Array:
    """The winner's law: outcomes in ascending order of the score, each with a uniform tag that breaks ties."""
    fine = np.repeat(p[order] / ties, ties)
    reached = np.concatenate([[0.0], np.minimum(np.cumsum(fine), 1.0)])
    return np.diff(law.generating(reached))


def delta_between(p: Array, q: Array, epsilon: float) -> float:
    return max(
        float(np.maximum(p - math.exp(epsilon) * q, 0).sum()), float(np.maximum(q - math.exp(epsilon) * p, 0).sum())
    )


@pytest.mark.parametrize(
    ("mu", "candidates", "shape", "expected"),
    [
        (0.5, 10, 0, 2.8438),
        (0.5, 10, 1, 3.0101),
        (0.5, 10, 2, 3.1230),
        (0.5, 10, math.inf, 3.8441),
        (0.5, 3, 1, 2.4782),
        (0.5, 30, 1, 3.4849),
        (1.0, 10, 0, 6.0819),
        (1.0, 10, 1, 6.4247),
    ],
)
def test_a_gaussian_costs_what_was_computed_elsewhere(
    mu: float, candidates: float, shape: float, expected: float
) -> None:
    found = selection_epsilon(gaussian_profile(mu), uncapped(candidates, shape), DELTA)
    assert found == pytest.approx(expected, rel=5e-4)


@pytest.mark.parametrize(("shape", "expected"), [(0, 3.2951), (1, 3.7570), (2, 4.0459), (math.inf, 4.2281)])
def test_one_shift_costs_what_was_computed_elsewhere(shape: float, expected: float) -> None:
    found = selection_epsilon(gaussian_profile(0.5), uncapped(10, shape), DELTA, "one_shift")
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("shape", "expected"), [(0, 2.7893), (1, 2.8340), (2, 2.8636)])
def test_sampled_steps_cost_what_was_computed_elsewhere(shape: float, expected: float) -> None:
    assert selection_epsilon(profile_of(run_of(64 / 4320, 0.8, 102)), uncapped(10, shape), DELTA) == pytest.approx(
        expected, rel=1e-3
    )


@pytest.mark.parametrize(("rate", "steps", "noise"), [(64 / 4576, 72, 0.8659), (64 / 4320, 102, 0.9112)])
def test_the_noise_of_a_search_of_ten_meets_epsilon_two(rate: float, steps: int, noise: float) -> None:
    assert selection_epsilon(profile_of(run_of(rate, noise, steps)), uncapped(10, 2), DELTA) == pytest.approx(
        2, rel=2e-3
    )


@pytest.mark.slow
def test_the_noise_of_a_search_on_a_large_table_meets_epsilon_two() -> None:
    found = selection_epsilon(profile_of(run_of(64 / 73271, 0.6016, 1145)), uncapped(10, 2), DELTA)
    assert found == pytest.approx(2, rel=3e-3)


def test_calibration_finds_the_noise_and_a_looser_bound_asks_for_more() -> None:
    schedule = Schedule(64 / 4320, 102, DELTA)

    def build_with(noise: float) -> object:
        return build("static", {"noise_multiplier": noise})

    one, alone = calibrated_candidate(build_with, 2, schedule, GEOMETRIC)  # type: ignore[arg-type]
    old, _ = calibrated_candidate(build_with, 2, schedule, GEOMETRIC, "one_shift")  # type: ignore[arg-type]
    noises = [mechanism.noise.noise_multiplier for mechanism in (alone, one, old)]
    assert noises == pytest.approx([0.8097, 0.9068, 1.0072], rel=1e-3)
    assert selection_epsilon(profile_of(run_of(64 / 4320, noises[1], 102)), GEOMETRIC, DELTA) <= 2


@pytest.mark.parametrize("seed", range(12))
def test_no_enumerated_selection_exceeds_the_bound(seed: int) -> None:
    """Random pairs, some with outcomes that one world lacks, random laws and orders; every hockey stick exactly."""
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 9))
    p, q = random.dirichlet(np.full(size, 0.7)), random.dirichlet(np.full(size, 0.7))
    if seed % 3 == 0:
        q[0] = 0.0
        q /= q.sum()
    law = SelectionLaw.of(float(random.uniform(1.2, 15)), [0.0, 1.0, 2.0, math.inf][seed % 4])
    profile = profile_of_pair(p, q)
    worst = 0.0
    for epsilon in (0.0, 0.3, 1.0, 2.5):
        bound = selection_delta(profile, law, epsilon)
        ratios = [p / np.maximum(q, 1e-300)]
        orders = [np.argsort(ratios[0]), np.argsort(-ratios[0]), *(random.permutation(size) for _ in range(20))]
        exact = [delta_between(winner(p, order, law), winner(q, order, law), epsilon) for order in orders]
        assert max(exact) <= bound * (1 + 1e-6) + 1e-12
        assert bound <= selection_delta(profile, law, epsilon, "one_shift") * (1 + 1e-6) + 1e-12
        worst = max(worst, max(exact) / max(bound, 1e-12))
    assert worst > 0.4  # the bound says something of these very pairs


def test_randomised_response_attains_the_closed_form() -> None:
    """With two outcomes and a tag the bound is exact, at any epsilon below that of the selection."""
    e = math.e
    p, q = np.array([e, 1.0]) / (1 + e), np.array([1.0, e]) / (1 + e)
    profile = profile_of_pair(p, q)
    closed = pure_selection_epsilon(1.0, GEOMETRIC)
    assert closed == pytest.approx(2.591344, abs=1e-6)
    assert selection_epsilon(profile, GEOMETRIC, 1e-9) == pytest.approx(closed, rel=3e-3)
    exact = winner(p, np.array([0, 1]), GEOMETRIC, 2000), winner(q, np.array([0, 1]), GEOMETRIC, 2000)
    for epsilon in (0.5, 1.5, 2.3):
        shown = max(delta_between(*exact, epsilon), 0.0)
        assert shown <= selection_delta(profile, GEOMETRIC, epsilon) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("candidates", "shape", "expected"), [(10, 0, 1.939236), (10, 1, 2.591344), (1000, 1, 2.995306)]
)
def test_pure_candidates_cost_the_closed_form(candidates: float, shape: float, expected: float) -> None:
    law = SelectionLaw.of(candidates, shape, 20_000)
    assert pure_selection_epsilon(1.0, law) == pytest.approx(expected, abs=1e-6)


def test_the_best_attack_known_comes_within_one_percent_of_the_bound() -> None:
    """The score prefers low numbers of the world with the canary, then the number itself."""
    edges = np.linspace(-9.0, 9.5, 60_001)
    middles = (edges[1:] + edges[:-1]) / 2
    with_canary, without = np.diff(ndtr(edges - 0.5)), np.diff(ndtr(edges))
    low = middles < 0.5 - 1.2815515655446004
    order = np.concatenate([np.flatnonzero(~low), np.flatnonzero(low)])
    worlds = winner(with_canary, order, GEOMETRIC, 1), winner(without, order, GEOMETRIC, 1)
    certified = selection_epsilon(gaussian_profile(0.5), GEOMETRIC, DELTA)
    assert delta_between(*worlds, certified) <= DELTA
    assert delta_between(*worlds, 0.99 * certified) > DELTA


def test_a_fixed_number_of_candidates_breaks_the_bound() -> None:
    """K fixed at the mean is a power: a low winner tells. The same table that certifies the law refutes it."""
    edges = np.linspace(-9.0, 9.5, 60_001)
    worlds = [np.diff(ndtr(edges - shift) ** 10) for shift in (0.5, 0.0)]
    assert delta_between(*worlds, selection_epsilon(gaussian_profile(0.5), GEOMETRIC, DELTA)) > DELTA


def test_one_candidate_more_or_less_than_one_costs_as_one_run() -> None:
    profile = profile_of(run_of(0.02, 1.0, 50))
    law = SelectionLaw.of(1.001, 1.0)
    alone = smallest_epsilon(run_of(0.02, 1.0, 50), DELTA)
    assert selection_epsilon(profile, law, DELTA) == pytest.approx(alone, rel=5e-3)


@pytest.mark.parametrize("shape", [0.0, 2.0, math.inf])
def test_widths_add_up_to_the_mean_and_shifts_rise(shape: float) -> None:
    law, profile = SelectionLaw.of(10, shape), profile_of(run_of(0.02, 0.9, 60))
    for side in (profile, profile.turned()):
        found = shifts_of(side, law)
        assert found.widths.sum() == pytest.approx(law.mean, rel=1e-9)
        assert float(found.widths @ np.exp(found.shifts)) <= law.mean * (1 + 1e-9)
        assert np.all(np.diff(found.shifts[np.isfinite(found.shifts)]) > 0)


def test_both_directions_count() -> None:
    """Sampled steps: the direction of the added unit alone would cost half."""
    profile = profile_of(run_of(64 / 4320, 0.8, 102))
    whole = selection_epsilon(profile, uncapped(10, 1), DELTA)
    assert whole == selection_epsilon(profile.turned(), uncapped(10, 1), DELTA)
    from dptune.privacy.selection import _epsilon_of

    sides = [_epsilon_of(side, shifts_of(side, uncapped(10, 1)), DELTA) for side in (profile, profile.turned())]
    assert sides == pytest.approx([2.834, 1.237], rel=2e-3)
    assert max(sides) == whole


def test_the_price_falls_with_noise_and_rises_with_candidates_steps_and_smaller_deltas() -> None:
    law = SelectionLaw.of(5, 2)
    base = selection_epsilon(profile_of(run_of(0.02, 1.0, 50)), law, DELTA)
    assert selection_epsilon(profile_of(run_of(0.02, 1.1, 50)), law, DELTA) < base
    assert selection_epsilon(profile_of(run_of(0.02, 1.0, 60)), law, DELTA) > base
    assert selection_epsilon(profile_of(run_of(0.02, 1.0, 50)), SelectionLaw.of(8, 2), DELTA) > base
    assert selection_epsilon(profile_of(run_of(0.02, 1.0, 50)), law, 1e-7) > base
    assert base > smallest_epsilon(run_of(0.02, 1.0, 50), DELTA)


def test_profiles_are_never_below_the_accountant_and_meet_it() -> None:
    """At the epsilon that the accountant certifies for a delta, the profile says no more than a little above it."""
    for composition in (run_of(0.02, 0.8, 100), run_of(0.001, 0.6, 1000), run_of(1.0, 5.0, 4)):
        profile = profile_of(composition)
        for delta in (1e-3, 1e-5, 1e-8):
            epsilon = smallest_epsilon(composition, delta)
            found = float(np.max([profile.delta(np.array(epsilon)), profile.turned().delta(np.array(epsilon))]))
            assert 0.97 * delta <= found <= 1.02 * delta


def test_a_profile_of_one_gaussian_is_the_closed_form_at_negative_epsilons_too() -> None:
    profile = gaussian_profile(0.7)
    at = np.array([-2.0, -0.5, -0.1, 0.0, 0.1, 0.5, 2.0])
    exact = ndtr(0.35 - at / 0.7) - np.exp(at) * ndtr(-0.35 - at / 0.7)
    assert profile.delta(at) == pytest.approx(exact, abs=1e-8)
    assert np.all(profile.delta(at) >= exact)
    assert float(profile.delta(np.array(-np.inf))) == 1.0


def test_an_average_of_equal_kinds_is_one_and_lies_between_different_ones() -> None:
    small, large = profile_of(run_of(0.01, 0.9, 80)), profile_of(run_of(0.02, 0.9, 80))
    law = SelectionLaw.of(5, 2)
    prices = [selection_epsilon(one, law, DELTA) for one in (small, average([(0.5, small), (0.5, large)]), large)]
    assert prices == sorted(prices)
    assert prices[0] < prices[1] < prices[2]
    assert selection_epsilon(average([(0.5, small), (0.5, small)]), law, DELTA) == pytest.approx(prices[0], rel=1e-12)
    assert selection_epsilon(largest([small, large]), law, DELTA) == pytest.approx(prices[2], rel=1e-6)


@pytest.mark.parametrize("weights", [(0.5, 0.4), (1.0, 0.5), (1.5, -0.5)])
def test_weights_that_are_no_distribution_are_refused(weights: tuple[float, float]) -> None:
    profile = gaussian_profile(0.5)
    with pytest.raises(ConfigError, match="weight"):
        average([(weight, profile) for weight in weights])


def test_the_published_bound_is_what_its_library_says_and_costs_more() -> None:
    for shape, expected in ((0, 3.638538), (1, 4.315072), (2, 4.864215)):
        found = renyi_selection_epsilon(run_of(1.0, 2.0, 1), uncapped(10, shape), DELTA)
        assert found == pytest.approx(expected, rel=5e-3)
        assert found > selection_epsilon(gaussian_profile(0.5), uncapped(10, shape), DELTA)


def test_the_four_ways_to_count_are_in_order() -> None:
    found = price_selection(run_of(64 / 4320, 0.9112, 102), SelectionLaw.of(10, 2), DELTA)
    assert found.one_candidate < found.certified < found.one_shift < found.renyi
    assert found.certified < found.composed


def test_noise_too_small_for_the_tables_has_no_price() -> None:
    assert selection_epsilon(profile_of(run_of(0.5, 0.01, 100)), SelectionLaw.of(3), DELTA) == math.inf


@pytest.mark.parametrize("release", [Release(0.1, 0.0, noise="none"), Release(0.1, 1.0, raw_inputs=("loss",))])
def test_releases_without_a_guarantee_are_refused(release: Release) -> None:
    with pytest.raises(ConfigError, match="mechanism"):
        profile_of(Counter({release: 3}))


def test_an_unknown_bound_and_delta_are_refused() -> None:
    with pytest.raises(ConfigError, match="bound"):
        selection_epsilon(gaussian_profile(1), GEOMETRIC, DELTA, "best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="delta"):
        selection_epsilon(gaussian_profile(1), GEOMETRIC, 0.0)


@pytest.mark.parametrize("name", ["rldp"])
def test_noise_that_moves_is_no_candidate(name: str) -> None:
    with pytest.raises(ConfigError, match="moves its noise"):
        calibrated_candidate(
            lambda noise: build(name, {"pairs": 2, "noise_multiplier": noise, "move_noise": True}),
            4,
            Schedule(0.02, 50, DELTA),
            GEOMETRIC,
        )
