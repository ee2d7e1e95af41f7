"""The certified epsilon against an independent computation: never below the truth, and near it, at any delta.

``python -m tests.privacy.test_composed_losses`` prints the table of all points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.privacy.accountants import gdp_epsilon, pld_epsilon
from dptune.privacy.accounting import composed_losses
from dptune.privacy.accounting.composed_losses import composed_epsilon, merge
from dptune.privacy.accounting.sampled_gaussian import (
    MASS_ERROR,
    GridLosses,
    Kind,
    _cell_probabilities,
    _outcomes,
    end_error,
    grid_losses,
)
from dptune.privacy.release import Release
from tests.privacy.loss_truth import Releases, rare_epsilon, true_delta

#: Where the attacked version was below the truth, or far above it: (releases, delta).
NAMED = [
    ([(1e-3, 0.5, 10_000)], 1e-12),
    ([(1e-5, 0.45, 1_000_000)], 1e-9),
    ([(0.01, 0.7, 10_000)], 1e-12),
    ([(16 / 73271, 1.2, 13_739)], 1e-5),
    ([(1.21e-5, 1.423, 675_445)], 5.1e-11),
    ([(16 / 73271, 0.4 + 0.01 * kind, 215) for kind in range(64)], 1e-5),
    ([(0.01, 0.8 + 0.02 * kind, 30) for kind in range(64)], 1e-13),
    ([(0.02, 3.0, 2_000), (1.0, 40.0, 5), (0.3, 12.0, 50)], 1e-7),
]
RANDOM, QUICK = 56, 12  # points drawn besides, and how many of them `make test` looks at


def random_points(count: int, seed: int) -> Iterator[tuple[Releases, float]]:
    """Settings whose epsilon lies between 0.02 and 20, delta from 1e-14 to 0.1, one to three kinds."""
    rng = np.random.default_rng(seed)
    while count:
        kinds = [
            (math.exp(rng.uniform(math.log(1e-5), math.log(0.5))), math.exp(rng.uniform(math.log(0.4), math.log(6))))
            for _ in range(rng.integers(1, 4))
        ]
        releases = [(q, z, int(math.exp(rng.uniform(math.log(50), math.log(1e5))))) for q, z in kinds]
        delta = 10 ** rng.uniform(-14, -1)
        # The true delta's integral converges too slowly where hardly any release meets the unit.
        if sum(q * n for q, _, n in releases) > 3 and 0.02 <= epsilon_of(releases, delta) <= 20:
            count -= 1
            yield releases, delta


def epsilon_of(releases: Releases, delta: float) -> float:
    return pld_epsilon(Counter({Release(q, z): count for q, z, count in releases}), delta)


def ratio_to_truth(releases: Releases, delta: float) -> float:
    """The certified epsilon over the true one, which is found along the slope of log delta."""
    epsilon = epsilon_of(releases, delta)
    here, below = (true_delta(releases, point, delta / 1000) for point in (epsilon, 0.995 * epsilon))
    slope = math.log(below / here) / (0.005 * epsilon)
    return epsilon / (epsilon - math.log(delta / here) / slope)


@cache
def points(drawn: int) -> list[tuple[Releases, float]]:
    """All points; not built at import, for every worker imports this file to collect its tests."""
    return [*NAMED, *random_points(drawn, seed=0)]


@pytest.mark.parametrize("number", range(len(NAMED) + QUICK))
def test_certified_is_never_below_the_truth_and_within_two_percent_of_it(number: int) -> None:
    assert 1 - 1e-7 <= ratio_to_truth(*points(QUICK)[number]) <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NAMED) + QUICK, len(NAMED) + RANDOM))
def test_nor_is_it_at_many_more_points(number: int) -> None:
    assert 1 - 1e-7 <= ratio_to_truth(*points(RANDOM)[number]) <= 1.02


@pytest.mark.parametrize("cut", [1e-6, 0.3])
@pytest.mark.parametrize("tilted", [1e-6, 0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    ("point", "truth"),
    [
        (NAMED[0], 12.774218),
        (NAMED[3], 0.0784796),
        (([(1.0, 1.0, 1)], 1e-6), gdp_epsilon(1.0, 1e-6)),
    ],
)
def test_what_decides_about_precision_never_decides_about_truth(
    point: tuple[Releases, float], truth: float, tilted: float, cut: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tilt round-off drowns delta, and what is cut off may be a third of it: then epsilon is only larger."""
    look = composed_losses._chernoff

    def elsewhere(*arguments: Any) -> tuple[float, float]:
        tilt, epsilon = look(*arguments)
        return tilt * tilted, epsilon

    monkeypatch.setattr(composed_losses, "_chernoff", elsewhere)
    monkeypatch.setattr(composed_losses, "_CUT", cut)
    releases, delta = point
    assert composed_epsilon([Kind(*kind) for kind in releases], delta) >= truth


#: A handful of releases that hardly ever meet a unit, at small deltas, and the cell of the truth's grid.
RARE = [
    ([(1.5e-5, 0.565, 1)], 4e-11, 2e-5),
    ([(1.0575913593466227e-05, 0.773, 4), (1.27e-5, 1.434, 2)], 5.29e-14, 2.5e-5),
    ([(1e-5, 0.5, 8)], 9.6e-14, 1e-3),
    ([(3e-5, 0.7, 10), (1e-7, 0.6, 5)], 1e-12, 2e-4),
]


@pytest.mark.parametrize(("releases", "delta", "width"), RARE)
def test_rare_releases_too_are_within_two_percent_of_the_truth(releases: Releases, delta: float, width: float) -> None:
    if composed_losses._REAL is np.float64:
        pytest.skip("This processor has no numbers of 64 bits of mantissa, without which epsilon is looser here.")
    least, most = rare_epsilon(releases, delta, width)
    assert most <= 1.02 * least
    assert least <= epsilon_of(releases, delta) <= 1.02 * least


@pytest.mark.parametrize("real", [np.float64, np.longdouble])
@pytest.mark.parametrize(("releases", "chances"), [(2, np.linspace(0.1, 0.9, 41)), (200, [0.3])])
def test_composed_probabilities_are_bounded_from_above_one_by_one(
    real: type, releases: int, chances: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two losses, so that the sum is binomial. Round-off alone would leave about half of the probabilities too low."""
    monkeypatch.setattr(composed_losses, "_REAL", real)
    for chance in chances:
        mass = np.array([1 - chance, chance])
        term = composed_losses._Tilted(
            Kind(0.5, 1.0, releases), GridLosses(0, np.array([0.0, 1.0]), mass, 0.0), mass, 0.0
        )
        found = composed_losses._Sum((term,), 1.0, 0.0)._composed(0, 256)[: releases + 1]
        with mpmath.workdps(40):
            rare, often = (mpmath.mpf(float(share)) for share in (mass[1], mass[0]))
            exact = [math.comb(releases, one) * rare**one * often ** (releases - one) for one in range(releases + 1)]
            above = [mpmath.mpf(float(bound)) - truth for bound, truth in zip(found, exact, strict=True)]
        assert min(above) >= 0
        assert max(above) < 1e-15 + 1e5 * float(np.finfo(real).eps)


@settings(max_examples=15)
@given(
    q=st.floats(1e-4, 0.2), z=st.floats(0.5, 4.0), count=st.integers(1, 20_000), log_delta=st.floats(-32, -3),
    more=st.floats(1.002, 1.5),
)  # fmt: skip
def test_more_noise_never_costs_more(q: float, z: float, count: int, log_delta: float, more: float) -> None:
    """Up to half of what the grid adds, so that a calibration finds its way."""
    less, much = (composed_epsilon([Kind(q, noise, count)], math.exp(log_delta)) for noise in (z * more, z))
    assert less <= much * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize("delta", [1e-100, 1e-30, 1e-12, 0.1, 0.6, 0.999])
@pytest.mark.parametrize(("z", "count"), [(1.0, 1), (3.0, 7), (0.05, 2), (500.0, 10**6)])
def test_without_sampling_it_is_gaussian_dp(z: float, count: int, delta: float) -> None:
    truth = gdp_epsilon(math.sqrt(count) / z, delta)
    found = composed_epsilon([Kind(1.0, z, count)], delta)
    assert truth <= found <= truth * 1.01 + 1e-3


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_one_release_is_amplified_as_the_closed_form_says(delta: float) -> None:
    """delta(log(1 + q (e^e - 1))) of ``remove`` is q times the Gaussian's delta(e) (Balle et al. 2018)."""
    q, z = 0.1, 0.9
    truth = math.log1p(q * math.expm1(gdp_epsilon(1 / z, delta / q)))
    assert truth <= composed_epsilon([Kind(q, z, 1)], delta) <= truth * 1.01 + 1e-3


@pytest.mark.parametrize("rate", [1e-9, 0.3, 1 - 1e-12])
@pytest.mark.parametrize("noise", [0.02, 0.5, 30.0])
def test_the_ends_of_cells_lie_where_the_losses_are(rate: float, noise: float) -> None:
    """Against 60 digits: the loss at a computed outcome is off by no more than is added for it."""
    least = math.log1p(-rate)
    losses = least + np.array([1e-13, 1e-6, 0.1, 3.0, 20.0])
    found = _outcomes(rate, noise, losses)
    with mpmath.workdps(60):
        for loss, x in zip(losses, found, strict=True):
            ratio = mpmath.exp((mpmath.mpf(x) - mpmath.mpf(1) / 2) / mpmath.mpf(noise) ** 2)
            exact = mpmath.log(1 - mpmath.mpf(rate) + mpmath.mpf(rate) * ratio)
            assert abs(exact - mpmath.mpf(loss)) <= end_error(Kind(rate, noise, 1))


@pytest.mark.parametrize("noise", [5e-324, 1e-300, 1e-160, 1e-8, 0.019, 1e7, 1e300])
@pytest.mark.parametrize("rate", [1e-12, 0.01, 1.0])
@pytest.mark.filterwarnings("error")
def test_extreme_noise_is_priced_without_a_warning(noise: float, rate: float) -> None:
    found = pld_epsilon(Counter({Release(rate, noise): 10}), 1e-5)
    # At a rate of 1e-12 ten releases meet a unit with a chance below delta.
    assert found >= 1 / noise if noise < 1 and rate > 1e-12 else found == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("centre", [-37.0, -8.0, -0.3, 0.0, 2.5, 20.0])
@pytest.mark.parametrize("width", [1e-9, 1e-5, 0.02, 0.9, 3.0])
def test_probabilities_of_cells_are_as_exact_as_is_argued(centre: float, width: float) -> None:
    ends = np.array([centre, centre + width])
    with mpmath.workdps(60):
        near, far = (mpmath.ncdf(-abs(mpmath.mpf(end))) for end in sorted(ends, key=abs))
        exact = near - far if ends[0] * ends[1] > 0 else 1 - near - far
    assert abs(float(_cell_probabilities(ends)[1] / exact - 1)) < MASS_ERROR / 2


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("q", "z"), [(1e-4, 0.5), (0.2, 1.0), (1.0, 2.0)])
def test_the_grid_keeps_both_probabilities(q: float, z: float, direction: str) -> None:
    """All mass is there, and E exp(-loss), the mass under the other hypothesis, is not above 1."""
    grid = grid_losses(Kind(q, z, 1), direction, 1e-3, 1e-20)  # type: ignore[arg-type]
    assert grid.mass.sum() + grid.infinite == pytest.approx(1.0, abs=1e-10)
    assert float(np.exp(-grid.losses) @ grid.mass) == pytest.approx(1.0, abs=1e-6)
    assert float(np.exp(-grid.losses) @ grid.mass) <= 1 + 1e-10
    assert grid.infinite <= 1.1e-20


@given(
    kinds=st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(0.05, 50.0), st.integers(1, 9)), min_size=1, max_size=40)
)
def test_merging_keeps_every_release_and_never_helps(kinds: list[tuple[float, float, int]]) -> None:
    merged = merge([Kind(*kind) for kind in kinds], 0.01)
    assert sum(kind.releases for kind in merged) == sum(count for _, _, count in kinds)
    for q, z, count in kinds:
        (fine,), (coarse,) = (merge([Kind(q, z, count)], step) for step in (0.01, 0.02))
        assert (fine.sample_rate, fine.noise_multiplier) in {kind[:2] for kind in merged}
        assert coarse.sample_rate * (1 + 1e-12) >= fine.sample_rate >= q
        assert coarse.noise_multiplier * (1 - 1e-12) <= fine.noise_multiplier <= z
        assert fine.noise_multiplier >= z * math.exp(-0.01) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("rate", "noise", "count", "delta"),
    [(1e-5, 0.7, 1000, 1e-6), (1e-6, 0.7, 1000, 1e-5), (1e-5, 0.5, 100, 1e-5)],
)
def test_releases_that_hardly_ever_meet_a_unit(rate: float, noise: float, count: int, delta: float) -> None:
    """Of the chance of being met at all, so that epsilon is small however little noise there is."""
    kinds = [Kind(rate, noise, count)]
    full, rough = composed_epsilon(kinds, delta), composed_epsilon(kinds, delta, quick=True)
    # At epsilon, delta is at least what one release alone gives.
    one = math.log1p(rate * math.expm1(min(gdp_epsilon(1 / noise, min(delta / rate, 1 - 1e-9)), 700.0)))
    assert one * (1 - 1e-9) <= full <= rough <= 0.05
    assert full <= composed_epsilon([*kinds, Kind(0.01, 1.0, 1000)], delta) + 1e-9, "a part costs no more"


def test_a_rare_kind_with_hardly_any_noise_leaves_the_others_their_price() -> None:
    others = [Kind(1e-3, 1.0, 10_000)]
    alone = composed_epsilon(others, 1e-5)
    for noise in (0.0199, 0.02, 0.5):
        assert alone <= composed_epsilon([Kind(1e-12, noise, 1), *others], 1e-5) <= alone * 1.001


@pytest.mark.parametrize("kind", [Kind(0.44, 0.15, 5), Kind(0.5, 0.1, 1), Kind(0.085, 0.1, 1)])
def test_nothing_is_lost_where_delta_exceeds_the_chance_to_be_met(kind: Kind) -> None:
    chance = 1 - (1 - kind.sample_rate) ** kind.releases
    assert composed_epsilon([kind], chance * 1.0001) == 0
    assert composed_epsilon([kind], chance * 0.5) > 0


def test_twenty_thousand_kinds_cost_little_more_than_as_many_of_one() -> None:
    composition = Counter({Release(0.001, 1.0 + 1e-5 * kind): 1 for kind in range(20_000)})
    between = [composed_epsilon([Kind(0.001, z, 20_000)], 1e-5) for z in (1.2, 1.0)]
    assert between[0] < pld_epsilon(composition, 1e-5) < between[1]


if __name__ == "__main__":
    ratios = []
    for releases, delta in points(RANDOM):
        ratios.append(ratio_to_truth(releases, delta))
        print(f"{len(releases):3d} kinds, first {releases[0]}, delta {delta:.1e}: {ratios[-1]:.6f}")
    print(f"{len(ratios)} points, least {min(ratios):.7f}, largest {max(ratios):.7f}")
