"""The certified epsilon against an independent computation: never below the truth, and near it, at any delta.

``python -m tests.privacy.test_composed_losses`` prints the table of all points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.privacy.accountants import gdp_epsilon, pld_epsilon
from dptune.privacy.composed_losses import composed_epsilon, merge
from dptune.privacy.release import Release
from dptune.privacy.sampled_gaussian import MASS_ERROR, Kind, _cell_probabilities, _outcomes, end_error, grid_losses
from tests.privacy.loss_truth import Releases, true_delta

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


POINTS = [*NAMED, *random_points(56, seed=0)]


@pytest.mark.parametrize("number", range(len(POINTS)))
def test_certified_is_never_below_the_truth_and_within_two_percent_of_it(number: int) -> None:
    assert 1 - 1e-7 <= ratio_to_truth(*POINTS[number]) <= 1.02


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
    assert found >= 1 / noise if noise < 1 else found == pytest.approx(0.0, abs=1e-5)


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


def test_twenty_thousand_kinds_cost_little_more_than_as_many_of_one() -> None:
    composition = Counter({Release(0.001, 1.0 + 1e-5 * kind): 1 for kind in range(20_000)})
    between = [composed_epsilon([Kind(0.001, z, 20_000)], 1e-5) for z in (1.2, 1.0)]
    assert between[0] < pld_epsilon(composition, 1e-5) < between[1]


if __name__ == "__main__":
    ratios = []
    for releases, delta in POINTS:
        ratios.append(ratio_to_truth(releases, delta))
        print(f"{len(releases):3d} kinds, first {releases[0]}, delta {delta:.1e}: {ratios[-1]:.6f}")
    print(f"{len(ratios)} points, least {min(ratios):.7f}, largest {max(ratios):.7f}")
