"""Every rounding on the way to a search's price goes to the safe side: compared with closed forms, to nine digits."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtr

from dptune.core.errors import ConfigError
from dptune.privacy import selection
from dptune.privacy.accounting.composed_losses import _Sum
from dptune.privacy.accounting.loss_profile import GRID, gaussian_profile, profile_of
from dptune.privacy.accounting.sampled_gaussian import Kind
from dptune.privacy.release import Release
from dptune.privacy.selection import selection_delta, shifts_of
from dptune.privacy.selection_law import SelectionLaw

Array = NDArray[np.float64]
TOLERANCE = 1e-9


def exact(sample_rate: float, noise: float, at: Array) -> tuple[Array, Array]:
    """delta of one sampled Gaussian release, with the unit against without it, and the other way round."""
    q, z = sample_rate, noise
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        place = 0.5 + z * z * (np.log(np.expm1(at) + q) - math.log(q))
        remove = q * ndtr(-(place - 1) / z) - (np.expm1(at) + q) * ndtr(-place / z)
        place = 0.5 + z * z * (np.log(np.exp(-at) - 1 + q) - math.log(q))
        add = ndtr(place / z) - np.exp(at) * ((1 - q) * ndtr(place / z) + q * ndtr((place - 1) / z))
    return remove, np.where(np.exp(-at) - 1 + q <= 0, 0.0, add)


@pytest.mark.one_case("0.01-0.3", "0.5-1.0")
@pytest.mark.parametrize(
    ("sample_rate", "noise"), [(1e-6, 1.0), (0.01, 0.3), (0.5, 1.0), (0.999999, 5.0), (0.01, 50.0), (0.2, 0.25)]
)
def test_no_delta_of_a_profile_is_below_the_truth(sample_rate: float, noise: float) -> None:
    places = np.unique(np.concatenate([np.arange(0, 60, 7), np.geomspace(60, 50_000, 30).astype(int)]))
    profile = profile_of(Counter({Release(sample_rate, noise): 1}))
    for table, truth in zip((profile.remove, profile.add), exact(sample_rate, noise, GRID[places]), strict=True):
        seen = truth > 1e-17
        assert np.all(table[places][seen] >= truth[seen] * (1 - TOLERANCE))


@pytest.mark.parametrize("noises", [(1.0, 2.0), (2.0, 1.0)])
def test_a_profile_is_that_of_the_dearest_part(noises: tuple[float, float]) -> None:
    parts = Counter({Release(1.0, noise, part=part): 1 for part, noise in enumerate(noises)})
    np.testing.assert_array_equal(profile_of(parts).remove, gaussian_profile(1.0).remove)


def test_beyond_its_table_a_profile_keeps_its_last_value() -> None:
    profile = gaussian_profile(12.0)
    assert float(profile.delta(np.array(61.0))) == profile.remove[-1] > 0


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 2.5, 4.0])
def test_a_law_of_one_candidate_costs_no_less_than_it(epsilon: float) -> None:
    """Its winner is that candidate: the bound is nearly exact, and cells of the hull rounded the wrong way show."""
    mu, law = 1.3, SelectionLaw(shape=1.0, rate=1 - 1e-12, most=2)
    (place,) = np.flatnonzero(np.isclose(GRID, epsilon))
    truth = float(ndtr(mu / 2 - GRID[place] / mu) - math.exp(epsilon) * ndtr(-mu / 2 - GRID[place] / mu))
    found = selection_delta(gaussian_profile(mu), law, epsilon)
    assert truth * (1 - TOLERANCE) <= found <= truth * 1.01


@pytest.mark.parametrize("shape", [0.0, 1.0, 2.0, math.inf])
def test_one_shift_is_looser_than_the_hull_where_directions_differ(shape: float) -> None:
    profile, law = profile_of(Counter({Release(0.02, 0.7): 20})), SelectionLaw.of(8, shape)
    for side in (profile, profile.turned()):
        for epsilon in (0.1, 0.5, 1.0, 2.0):
            loose, tight = (shifts_of(side, law, bound).delta(side, epsilon) for bound in ("one_shift", "hull"))
            assert loose >= tight * (1 - TOLERANCE)


@pytest.mark.parametrize("shape", [0.0, 1.0, 2.0, math.inf])
def test_a_mean_of_hardly_more_than_one_candidate_is_a_law_or_refused_by_name(shape: float) -> None:
    assert SelectionLaw.of(1.001, shape).mean == pytest.approx(1.001, rel=1e-5)
    with pytest.raises(ConfigError, match=r"candidates: 1\.0000\d* is not a number of 1\.001 or more"):
        SelectionLaw.of(1.00001, shape)


def test_one_shift_reads_both_directions() -> None:
    """A winner is as likely to be told by its presence as by its absence."""
    profile, law = profile_of(Counter({Release(0.02, 0.7): 20})), SelectionLaw.of(8, 1.0)
    found = {float(shifts_of(side, law, "one_shift").shifts[0]) for side in (profile, profile.turned())}
    assert len(found) == 1


@pytest.mark.parametrize("shape", [0.0, 2.0, math.inf])
def test_fewer_cells_of_the_hull_never_cost_less(shape: float, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, law = profile_of(Counter({Release(0.02, 0.7): 20})), SelectionLaw.of(8, shape)
    places = (0.1, 0.5, 1.0, 2.0, 4.0)
    fine = [selection_delta(profile, law, epsilon) for epsilon in places]
    kept = np.unique([*range(0, len(selection._TAILS), 8), len(selection._TAILS) - 1])
    monkeypatch.setattr(selection, "_TAILS", selection._TAILS[kept])
    coarse = [selection_delta(profile, law, epsilon) for epsilon in places]
    assert all(more >= less * (1 - TOLERANCE) for more, less in zip(coarse, fine, strict=True))
    assert max(more / less for more, less in zip(coarse, fine, strict=True)) > 1.001


@pytest.mark.parametrize("cut", [1e-2, 1e-4, 1e-8])
def test_losses_above_the_grid_count_in_full(cut: float) -> None:
    places = GRID[::1500]
    for side, truth in zip(("remove", "add"), exact(0.01, 0.3, places), strict=True):
        found = _Sum.of([Kind(0.01, 0.3, 1)], side, 0.01, cut, 0.0).deltas(places)
        assert np.all(found >= truth * (1 - TOLERANCE))
