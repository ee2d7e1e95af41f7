"""The likelihood-ratio attack on simulated scores."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from dptune.audit.text.membership import auc, balanced_coins, lira_scores
from dptune.core.errors import ConfigError

Simulated = tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64], NDArray[np.bool_]]


def simulated(shadows: int, candidates: int, difficulty: float, seed: int = 0) -> Simulated:
    """(target, its coins, shadows, their coins): being in adds 1 to a score, whose noise has deviation 1."""
    generator = np.random.default_rng(seed)
    level = difficulty * generator.standard_normal(candidates)
    coins = np.concatenate([balanced_coins(shadows, candidates, generator), generator.random((1, candidates)) < 0.5])
    scores = level + coins + generator.standard_normal(coins.shape)
    return scores[-1], coins[-1], scores[:-1], coins[:-1]


def test_it_beats_the_raw_score_where_candidates_differ() -> None:
    target, coins, shadows, included = simulated(32, 1000, difficulty=3.0)
    ratios = lira_scores(target, shadows, included)
    assert auc(target[coins], target[~coins]) < 0.65
    # With the means known this is Phi(1 / sqrt(2)) = 0.76.
    assert 0.70 < auc(ratios[coins], ratios[~coins]) < 0.80


def test_it_is_a_ratio_of_normal_likelihoods() -> None:
    target, coins, shadows, included = simulated(400, 200, difficulty=3.0)
    ratios = lira_scores(target, shadows, included)
    for candidate in range(5):
        column, inside = shadows[:, candidate], included[:, candidate]
        one, other = (norm.logpdf(target[candidate], column[side].mean(), 1) for side in (inside, ~inside))
        # All that is left is the pooled variance, known to one percent or so.
        assert ratios[candidate] == pytest.approx(one - other, rel=0.03)
    assert ratios[coins].mean() > 0 > ratios[~coins].mean()


def test_variance_is_pooled_and_unbiased_by_hand() -> None:
    included = np.array([[True, False], [True, False], [False, True], [False, True]])
    shadows = np.array([[2.0, 0.0], [4.0, 2.0], [0.0, 7.0], [2.0, 7.0]])
    # Means in 3 and 7, out 1 and 1; residuals squared 1, 1, 1, 1 and 1, 1, 0, 0; freedom 8 - 4.
    expected = [((3 - 1) ** 2 - (3 - 3) ** 2) / (2 * 1.5), ((1 - 1) ** 2 - (1 - 7) ** 2) / (2 * 1.5)]
    assert lira_scores(np.array([3.0, 1.0]), shadows, included) == pytest.approx(expected)


def test_scores_stay_finite_where_shadows_agree_or_are_few() -> None:
    included = np.array([[True, False], [False, True]])
    ratios = lira_scores(np.array([1.0, 0.0]), included.astype(float), included)
    assert np.isfinite(ratios).all()
    assert ratios[0] > 0 > ratios[1]


@pytest.mark.parametrize("column", [[True, True, True], [False, False, False]])
def test_a_candidate_in_all_shadows_or_in_none_is_refused(column: list[bool]) -> None:
    included = np.array([[True, False, True], column]).T
    with pytest.raises(ConfigError, match=r"audit\.shadows.*Fix: train more shadows"):
        lira_scores(np.zeros(2), np.zeros((3, 2)), included)


@pytest.mark.parametrize("shadows", [2, 5, 16])
def test_every_candidate_is_in_half_of_the_shadows(shadows: int) -> None:
    coins = balanced_coins(shadows, 300, np.random.default_rng(0))
    assert coins.shape == (shadows, 300)
    assert coins.dtype == bool
    assert (coins.sum(axis=0) == shadows // 2).all()


def test_which_half_is_chance_of_its_own() -> None:
    """Two candidates share a shadow as often as independent halves do; false alarms: five deviations."""
    coins = balanced_coins(2, 2000, np.random.default_rng(1))
    assert abs(coins[0].mean() - 0.5) < 5 * 0.5 / 2000**0.5
    assert abs((coins[0, ::2] == coins[0, 1::2]).mean() - 0.5) < 5 * 0.5 / 1000**0.5
