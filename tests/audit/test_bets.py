"""Bets against a privacy curve: as rare a false alarm as they say, and certain where the curve is exceeded."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import gaussian_epsilon
from dptune.audit.games.bets import CUTS, Bets, Curve, mu_of
from dptune.privacy.accounting.loss_profile import gaussian_profile

ROUND = 50


def gaussian_curve(mu: float) -> Curve:
    deltas = tuple(float(delta) for delta in gaussian_profile(mu).delta(np.array(CUTS)))
    return Curve(deltas, deltas)


def played(mu: float, pairs: int, generator: np.random.Generator, charged: float | None = None) -> Bets:
    """Bets on Gaussian games at ``mu``, scored by the ratio that is exact where mu is ``charged``."""
    bets, move = Bets(), charged or mu
    for _ in range(pairs // ROUND):
        inside, outside = generator.standard_normal((2, ROUND)) * (move / mu)
        bets.add(*(move * (noise - move / 2) for noise in (inside + move, outside)))
    return bets


def test_a_curve_that_holds_is_hardly_ever_accused_however_long_one_plays() -> None:
    """1,000 gamblers against a curve that their games meet exactly, who may stop after any of 20 rounds."""
    generator, certified = np.random.default_rng(5), gaussian_curve(1.0)
    found = [played(1.0, 1000, generator) for _ in range(1000)]
    assert 0 < sum(bets.accuses(certified, 0.05) for bets in found) <= 50  # 0: wealth would not move at all
    assert sum(bets.delta_at(0, 0, 0.05) > certified.remove[0] for bets in found[:100]) <= 5
    assert sum(bets.epsilon_at(certified.remove[3], 0.05) > CUTS[3] for bets in found[:100]) <= 5


def test_halved_noise_is_certain_in_a_few_hundred_pairs_and_twice_the_noise_never() -> None:
    generator = np.random.default_rng(6)
    for mu in (0.5, 1.0, 1.666):
        certified = gaussian_curve(mu)
        assert all(played(2 * mu, 1000, generator, charged=mu).accuses(certified, 0.001) for _ in range(20))
        assert not any(played(mu / 2, 1000, generator, charged=mu).accuses(certified, 0.001) for _ in range(20))


@pytest.mark.parametrize(("mu", "shown"), [(0.5, 0.6), (1.666, 3.0)])
def test_bounds_come_close_to_the_truth_and_stay_below(mu: float, shown: float) -> None:
    bets, truth = played(mu, 20_000, np.random.default_rng(7)), gaussian_curve(mu)
    assert 0.9 * mu < mu_of(bets.delta_at(0, 0, 0.05)) < mu
    for cut in range(len(CUTS)):
        assert max(bets.delta_at(cut, direction, 0.05) for direction in (0, 1)) < truth.remove[cut]
    assert 0.45 * truth.remove[2] < bets.delta_at(2, 0, 0.05)
    assert shown < bets.epsilon_at(1e-5, 0.05) < gaussian_epsilon(mu, 1e-5)


def test_bounds_do_not_fall_when_more_is_played_or_more_may_be_wrong() -> None:
    generator = np.random.default_rng(8)
    bets, found = Bets(), []
    for _ in range(20):
        noise = generator.standard_normal((2, ROUND))
        bets.add(1.5 * (noise[0] + 0.75), 1.5 * (noise[1] - 0.75))
        found.append((bets.delta_at(0, 0, 0.05), bets.epsilon_at(1e-5, 0.05)))
    assert found == sorted(found)
    assert bets.delta_at(0, 0, 0.001) < bets.delta_at(0, 0, 0.05)
    assert bets.epsilon_at(1e-5, 0.05) >= bets.epsilon_at(1e-3, 0.05)


def test_scores_that_are_no_number_and_no_games_say_nothing() -> None:
    assert (Bets().delta_at(0, 0, 0.05), Bets().epsilon_at(1e-5, 0.05)) == (0.0, 0.0)
    assert not Bets().accuses(Curve.of_pairs([(0.0, 0.0)]), 0.05)
    bets, nothing = Bets(), np.full(1000, np.nan)
    bets.add(nothing, nothing)
    assert (bets.delta_at(0, 0, 0.05), bets.epsilon_at(1e-5, 0.05), bets.pairs) == (0.0, 0.0, 1000)


def test_a_curve_of_pairs_is_nowhere_below_a_curve_that_keeps_them() -> None:
    profile = gaussian_profile(1.0)
    at: NDArray[np.float64] = np.array([0.0, 0.3, 1.1, 2.0, 5.0])
    found = Curve.of_pairs(list(zip(at.tolist(), profile.delta(at).tolist(), strict=True)))
    truth = profile.delta(np.array(CUTS))
    assert np.all(np.array(found.remove) >= truth)
    assert found.remove[0] == pytest.approx(truth[0])
    assert found.remove[5] == pytest.approx(truth[5])
    assert Curve.of_pairs([]).remove == (1.0,) * len(CUTS)


def test_chords_are_straight_in_the_exponential_and_a_curve_never_rises() -> None:
    """Delta is a supremum of P(S) - e^epsilon Q(S): convex in e^epsilon, not in epsilon, where a chord may cut it."""
    between = Curve.of_pairs([(0.0, 0.5), (8.0, 0.0)]).remove[CUTS.index(6.0)]
    assert between == pytest.approx(0.5 * (np.exp(8) - np.exp(6)) / (np.exp(8) - 1))
    loose = Curve.of_pairs([(0.0, 0.2), (1.0, 0.1), (3.0, 0.4)]).remove  # delta 0.1 holds from epsilon 1 on
    assert loose[CUTS.index(3.0)] == loose[CUTS.index(8.0)] == pytest.approx(0.1)
