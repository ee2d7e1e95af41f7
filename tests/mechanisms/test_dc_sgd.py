"""DC-SGD-P and DC-SGD-E: P4.1 to P4.7 of the specification."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import EXPECTED, RATE, SIZES, batch_of, observed, plain, privatised, started, sums

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.dc_sgd import DcSgd, histogram
from dptune.mechanisms.interfaces import Released
from dptune.mechanisms.mechanism import Mechanism

torch.set_num_threads(1)

RULES = ["dc_sgd_p", "dc_sgd_e"]
#: Histograms as they are released: noise makes bins negative.
COUNTS = st.lists(st.floats(-10, 30, width=32), min_size=20, max_size=20)
#: And some that make the bins wider or narrower.
HISTOGRAMS = COUNTS | st.sampled_from([0, 19]).map(lambda bin_index: point_mass(bin_index))


def told(mechanism: Mechanism, counts: list[float], noise: float = 1.0) -> float:
    """The next radius of a controller that is told this noisy histogram, by a release with this gradient noise."""
    knobs = mechanism.knobs()
    released = Released([], [], torch.tensor(counts), knobs, (noise * knobs.radii[0],) * len(SIZES))
    mechanism.controller.observe(observed(released))
    return mechanism.knobs().radii[0]


def stride(mechanism: Mechanism) -> float:
    return mechanism.controller.metrics()["bin_width"]


def units(norms: list[float]) -> Any:
    """A batch whose units have these gradient norms, all in the first coordinate."""
    return batch_of([[norm] + [0.0] * 7 for norm in norms])


def point_mass(bin_index: int, bins: int = 20, mass: float = 100.0) -> list[float]:
    return [mass if index == bin_index else 0.0 for index in range(bins)]


def errors(candidates: list[float], counts: list[float], width: float, noise: float) -> list[float]:
    """Noise variance plus squared clipping bias of every candidate, by numpy."""
    positive = np.maximum(np.array(counts, dtype=np.float32).astype(np.float64), 0)
    middles = (np.arange(len(counts)) + 0.5) * width
    bias = [positive @ np.maximum(middles - radius, 0) ** 2 / positive.sum() for radius in candidates]
    return [b + (noise * c / EXPECTED) ** 2 * sum(SIZES) for b, c in zip(bias, candidates, strict=True)]


@given(z=st.floats(0.05, 10), surplus=st.floats(1.01, 100))
def test_p41_gradients_and_histogram_together_cost_what_is_charged(z: float, surplus: float) -> None:
    """z_T^-2 + z_H^-2 = z^-2."""
    z_histogram = z * surplus
    mechanism = started("dc_sgd_p", noise_multiplier=z, histogram_noise=z_histogram, max_grad_norm=0.3)
    *gradients, bins = (z * scale for scale in mechanism.scales(mechanism.knobs()))
    z_gradients = gradients[0] / 0.3
    assert len(set(gradients)) == 1, "one radius, one noise"
    assert bins == pytest.approx(z_histogram, rel=1e-12)
    assert (z_gradients**-2 + z_histogram**-2) * z**2 == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_p41_a_histogram_that_alone_costs_too_much_is_refused_before_the_first_step(name: str) -> None:
    started(name, noise_multiplier=2.0, histogram_noise=2.001)
    for noise in (1.0, 1.999, 2.0):
        with pytest.raises(ConfigError, match="statistics"):
            started(name, noise_multiplier=2.0, histogram_noise=noise)


@given(norms=st.lists(st.floats(0, 8), max_size=5), extra=st.sampled_from([0.0, 0.19, 0.2, 3.9, 4.0, 1e30, math.nan]))
def test_p42_a_unit_changes_exactly_one_bin_by_one(norms: list[float], extra: float) -> None:
    """20 bins of 0.2, the last one open; a unit that is not finite counts as one without gradient."""
    mechanism = started("dc_sgd_p")
    without, whole = (sums(mechanism, [units(rows)])[-1] for rows in (norms, [*norms, extra]))
    change = (whole - without).tolist()
    # The norm is that of a float32: 0.2 is a little above the edge.
    expected = 0 if math.isnan(extra) else min(int(float(np.float32(extra)) / 0.2), 19)
    assert change == point_mass(expected, mass=1.0)


@given(norms=st.lists(st.floats(0, 100), min_size=1, max_size=20), width=st.floats(1e-6, 1e6), bins=st.integers(2, 40))
def test_p42_every_unit_is_in_one_bin(norms: list[float], width: float, bins: int) -> None:
    counts = histogram(units(norms), width, bins)
    assert counts.shape == (bins,)
    assert float(counts.sum()) == len(norms)
    exact = np.clip(np.float32(norms).astype(np.float64) / width, 0, bins - 1).astype(int)
    assert counts.tolist() == np.bincount(exact, minlength=bins).tolist()


@pytest.mark.parametrize("name", RULES)
def test_p43_with_a_frozen_radius_and_endless_histogram_noise_it_is_dp_sgd(name: str) -> None:
    mechanism, static = started(name, histogram_noise=1e9, lowest_radius=1.0, highest_radius=1.0), started("static")
    batch = [units([0.2, 3.0, 50.0])]
    for seed in range(3):
        released = privatised(mechanism, batch, seed)
        torch.testing.assert_close(released.gradient, privatised(static, batch, seed).gradient)
        mechanism.controller.observe(observed(released))
        assert mechanism.knobs().radii == (1.0,)


@pytest.mark.parametrize("bin_index", [0, 7, 12, 18])
@pytest.mark.parametrize("target", [0.1, 0.5, 0.99])
def test_p44_the_percentile_of_a_point_mass_is_the_edge_of_its_bin(bin_index: int, target: float) -> None:
    mechanism = started("dc_sgd_p", target=target)
    assert told(mechanism, point_mass(bin_index)) == pytest.approx(0.2 * (bin_index + 1))


@pytest.mark.parametrize(("target", "edge"), [(0.1, 3), (0.3, 5), (0.59, 5), (0.61, 9)])
def test_p44_the_percentile_is_the_first_edge_that_exceeds_the_target(target: float, edge: int) -> None:
    """Bins 2, 4 and 8 hold 0.3, 0.3 and 0.4; at exactly 0.3 nothing is exceeded yet. Negative bins count as 0."""
    counts = [-9.0] * 20
    counts[2], counts[4], counts[8] = 30.0, 30.0, 40.0
    assert told(started("dc_sgd_p", target=target), counts) == pytest.approx(0.2 * edge)


@pytest.mark.parametrize("bin_index", [2, 4, 7])
def test_p44_without_noise_the_least_error_clips_nobody_and_no_wider_than_that(bin_index: int) -> None:
    """The smallest candidate at or above the midpoint of the bin; candidates are tenths of the radius, 1."""
    middle = 0.2 * (bin_index + 0.5)
    expected = math.ceil(middle * 10 - 1e-9) / 10
    assert told(started("dc_sgd_e"), point_mass(bin_index), noise=0.0) == pytest.approx(expected)


def test_p44_with_much_noise_the_least_error_goes_to_the_lowest_radius() -> None:
    assert told(started("dc_sgd_e"), point_mass(3), noise=1e9) == 1e-3


@given(counts=COUNTS, noise=st.floats(0, 30), start=st.sampled_from([0.05, 1.0, 4.0]))
def test_p45_the_chosen_radius_is_the_best_of_all_candidates_around_it(
    counts: list[float], noise: float, start: float
) -> None:
    """Brute force by numpy, again around every optimum that sits on the boundary."""
    mechanism = started("dc_sgd_e", max_grad_norm=start)
    chosen = told(mechanism, counts, noise)
    if max(np.float32(counts)) <= 0:
        assert chosen == start
        return
    radius = start
    for _ in range(20):
        candidates = [radius * tenth / 10 for tenth in range(1, 21)]
        radius = candidates[int(np.argmin(errors(candidates, counts, 0.2 * start, noise)))]
        if radius not in (candidates[0], candidates[-1]) or not 1e-3 < radius < 100:
            break
    assert 1e-3 <= chosen <= 100
    reached, wanted = errors([chosen, min(max(radius, 1e-3), 100.0)], counts, 0.2 * start, noise)
    assert reached == pytest.approx(wanted, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bins", [2, 5, 20])
@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_p46_the_radius_stays_within_its_bounds_on_noise_alone(name: str, bins: int, memory: float) -> None:
    steps = 2000
    bounds = {"lowest_radius": 0.05, "highest_radius": 3.0}
    mechanism = started(name, bins=bins, memory=memory, **bounds)
    noise = 6 * np.random.default_rng(0).standard_normal((steps, bins))
    radii = [told(mechanism, list(row)) for row in noise]
    assert min(radii) >= 0.05
    assert max(radii) <= 3.0
    assert all(math.isfinite(radius) for radius in radii)
    assert 0 < stride(mechanism) < math.inf
    assert len(set(radii)) > 1, "it did move"
    assert all(math.isfinite(float(block.sum())) for block in sums(mechanism, [units([0.0, 1.0, 1e30])]))


def test_p46_bins_that_shrink_for_ever_break_nothing() -> None:
    """All mass in the first bin, 1,500 times: a double ends after 1,075 halvings."""
    mechanism = started("dc_sgd_p")
    for _ in range(1500):
        told(mechanism, point_mass(0))
    counts = sums(mechanism, [units([0.0, 1e-3, 5.0])])[-1]
    assert counts.sum() == 3
    assert mechanism.knobs().radii == (1e-3,)


def test_p46_bins_that_grow_for_ever_break_nothing() -> None:
    mechanism = started("dc_sgd_p")
    for _ in range(1500):
        told(mechanism, point_mass(19))
    assert sums(mechanism, [units([0.0, 1e-3, 5.0])])[-1].sum() == 3
    assert mechanism.knobs().radii == (100.0,)


@pytest.mark.parametrize("name", RULES)
def test_p47_a_step_is_one_release_with_z_that_names_the_histogram(name: str) -> None:
    mechanism = started(name, noise_multiplier=0.7)
    release = mechanism.release(mechanism.knobs(), RATE)
    assert (release.noise_multiplier, release.sensitivity, release.adaptive) == (0.7, 1.0, False)
    assert release.statistics == ("gradient sum", "histogram of gradient norms")
    assert release.leaks == ()


@pytest.mark.parametrize("name", RULES)
def test_a_histogram_without_mass_moves_nothing(name: str) -> None:
    mechanism = started(name, memory=0.0)
    told(mechanism, point_mass(3))
    before = plain(mechanism.knobs()), stride(mechanism)
    assert told(mechanism, [-1.0] * 20) == before[0][0][0]
    assert (plain(mechanism.knobs()), stride(mechanism)) == before


def test_bins_double_when_the_open_one_holds_more_than_half() -> None:
    for share, expected in ((51.0, 0.4), (49.0, 0.2)):
        mechanism = started("dc_sgd_p")
        counts = point_mass(19, mass=share)
        counts[12] = 100 - share
        told(mechanism, counts)
        assert stride(mechanism) == pytest.approx(expected)


def test_bins_halve_when_the_upper_half_holds_less_than_a_bins_share() -> None:
    for share, expected in ((4.9, 0.1), (5.1, 0.2)):
        mechanism = started("dc_sgd_p")
        counts = point_mass(10, mass=share)
        counts[2] = 100 - share
        told(mechanism, counts)
        assert stride(mechanism) == pytest.approx(expected)


def test_the_memory_is_a_running_average_that_forgets_bins_of_another_width() -> None:
    mechanism = started("dc_sgd_p", memory=0.9, target=0.5)
    assert told(mechanism, point_mass(12)) == pytest.approx(2.6)
    assert told(mechanism, point_mass(15)) == pytest.approx(2.6), "nine tenths of the mass are in bin 12"
    for _ in range(6):
        radius = told(mechanism, point_mass(15))
    assert radius == pytest.approx(3.2), "0.9 to the seventh is below a half"
    told(mechanism, point_mass(2, mass=1e6))
    assert stride(mechanism) == pytest.approx(0.1)
    assert told(mechanism, point_mass(5)) == pytest.approx(0.6), "of the new, narrower bins alone"


@given(norms=st.lists(st.floats(0, 8), max_size=5))
def test_the_bins_of_a_step_do_not_depend_on_its_batch(norms: list[float]) -> None:
    mechanism = started("dc_sgd_e")
    before = stride(mechanism), plain(mechanism.knobs())
    sums(mechanism, [units(norms)])
    assert (stride(mechanism), plain(mechanism.knobs())) == before


@pytest.mark.parametrize("name", RULES)
@given(histograms=st.lists(HISTOGRAMS, min_size=1, max_size=4))
def test_p08_the_next_knobs_are_a_function_of_the_histograms_alone(name: str, histograms: list[list[float]]) -> None:
    one, other = started(name), started(name)
    for counts in histograms:
        sums(one, [units([1e9] * 30)])
        sums(other, [units([0.0])])
        assert told(one, counts) == told(other, counts)
        assert stride(one) == stride(other)


@pytest.mark.parametrize("name", RULES)
def test_from_real_releases_the_radius_finds_the_scale_of_the_norms(name: str) -> None:
    """Norms around 5 and a start at 0.1; the seeds are fixed."""
    norms = np.random.default_rng(0).uniform(4, 6, 2000)
    mechanism = started(name, expected=2000.0, max_grad_norm=0.1, noise_multiplier=0.5)
    for seed in range(40):
        released = privatised(mechanism, [units(norms.tolist())], seed)
        mechanism.controller.observe(observed(released, seed + 1))
    assert 3.5 < mechanism.knobs().radii[0] < 7


@pytest.mark.parametrize("clipper", ["per_pair", "transformed", "none"])
def test_it_needs_one_radius(clipper: str) -> None:
    with pytest.raises(ConfigError, match="controller dc_sgd"):
        started("dc_sgd_p", clipper=clipper)


def test_before_it_is_started_it_releases_nothing() -> None:
    assert DcSgd().statistics(started("static").knobs(), 1.0) is None


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *(("rule", bad) for bad in ("median", None, 1)),
        *(("target", bad) for bad in (0, 1, -0.5, "nan", "half")),
        *(("bins", bad) for bad in (1, 0, -5, 2.5, "nan", "inf", "many")),
        *(("memory", bad) for bad in (-0.1, 1, "nan", "inf")),
        *itertools.product(("width", "histogram_noise", "lowest_radius"), (0, -1, "nan", "inf", "some")),
        *(("highest_radius", bad) for bad in (0, 1e-4, "nan", "inf")),
    ],
)
def test_bad_options_are_refused(option: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=option) as caught:
        started("dc_sgd_p", **{option: bad})
    assert caught.value.field == option
