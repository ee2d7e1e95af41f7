"""The one-run audit claims too much no oftener than it says, and finds what is there."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit, ndtr
from scipy.stats import binom

from dptune.audit import one_run as module
from dptune.audit.epsilon_bounds import gaussian_epsilon, one_run_mu
from dptune.audit.one_run import OneRun, one_run
from dptune.core.errors import DataError

DELTA = 1e-5
RUNS, CANARIES, CONFIDENCE = 1200, 60, 0.8
#: A sound bound fails in more of the runs with probability 1e-6 at most.
ALLOWED = int(binom.isf(1e-6, RUNS, 1 - CONFIDENCE))

Coins = NDArray[np.bool_]
Scores = NDArray[np.float64]
Attack = Callable[[Coins, np.random.Generator], Scores]


def coins_of(count: int, generator: np.random.Generator) -> Coins:
    return generator.random(count) < 0.5


def kept_with(chance: float) -> Attack:
    """Randomised response: each score is the coin, or with chance ``1 - chance`` its other side."""

    def scores(coins: Coins, generator: np.random.Generator) -> Scores:
        return (coins == (generator.random(len(coins)) < chance)).astype(float)

    return scores


def gaussian(mu: float) -> Attack:
    return lambda coins, generator: mu * coins + generator.standard_normal(len(coins))


def audited(attack: Attack, count: int, confidence: float, generator: np.random.Generator) -> OneRun:
    coins = coins_of(count, generator)
    return one_run(attack(coins, generator), coins, DELTA, confidence)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal counts have equal bounds: thousands of runs need each only once."""
    for name in ("one_run_mu", "gaussian_epsilon"):  # ranked_epsilon remembers
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))


@pytest.mark.one_case("3.0")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_epsilon_is_covered_under_randomised_response(epsilon: float) -> None:
    """False alarms: 1e-6. Nothing is harder, as the scores lose nothing of what epsilon allows."""
    generator, attack = np.random.default_rng(1), kept_with(float(expit(epsilon)))
    bounds = [audited(attack, CANARIES, CONFIDENCE, generator).epsilon_audited for _ in range(RUNS)]
    assert sum(bound > epsilon for bound in bounds) <= ALLOWED


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_mu_and_epsilon_are_covered_under_gaussian_scores(mu: float, rounded: bool) -> None:
    """False alarms: 2e-6, 1e-6 for each bound. Rounded to the likelier coin, all guesses are equally good."""
    generator = np.random.default_rng(2)
    attack = kept_with(float(ndtr(mu / 2))) if rounded else gaussian(mu)
    results = [audited(attack, CANARIES, CONFIDENCE, generator) for _ in range(RUNS)]
    assert sum(result.mu_gaussian > mu for result in results) <= ALLOWED
    truth = gaussian_epsilon(mu, DELTA)
    assert sum(result.epsilon_audited > truth for result in results) <= ALLOWED
    assert all((result.epsilon_gaussian > truth) == (result.mu_gaussian > mu) for result in results)


def test_many_canaries_show_much_of_what_is_there() -> None:
    response = audited(kept_with(float(expit(2.0))), 4000, 0.95, np.random.default_rng(3))
    assert 1.7 < response.epsilon_audited < 2.0
    normal = audited(gaussian(2.0), 4000, 0.95, np.random.default_rng(4))
    assert 1.2 < normal.mu_gaussian < 2.0
    assert normal.epsilon_audited < normal.epsilon_gaussian < gaussian_epsilon(2.0, DELTA)


def test_a_perfect_attack_shows_the_most_there_is() -> None:
    coins = np.random.default_rng(0).permutation(256) < 128
    result = one_run(coins.astype(float), coins, DELTA, 0.95)
    assert result.epsilon_audited == result.most > 3
    assert (result.guesses, result.correct, result.included) == (256, 256, 128)


@pytest.mark.parametrize("seed", range(5))
def test_an_attack_at_chance_shows_nothing_to_speak_of(seed: int) -> None:
    result = audited(kept_with(0.5), 256, 0.95, np.random.default_rng(seed))
    assert result.epsilon_audited <= 0.2
    assert result.mu_gaussian <= 0.2


def test_the_attacker_abstains_where_most_canaries_tell_nothing() -> None:
    generator = np.random.default_rng(5)
    coins = coins_of(400, generator)
    told = generator.permutation(400) < 60
    scores = np.where(told, np.where(coins, 9.0, -9.0), 0.0) + generator.standard_normal(400)
    result = one_run(scores, coins, DELTA, 0.95)
    assert (result.guesses, result.correct) == (40, 40)
    assert result.epsilon_audited > 2
    assert result.mu_gaussian == one_run_mu(400, 40, 40, 1 - 0.05 / 4)  # of 400 coins, not of 40


def test_only_the_order_of_the_scores_counts() -> None:
    generator = np.random.default_rng(6)
    coins = coins_of(101, generator)
    scores = gaussian(2.0)(coins, generator)
    result = one_run(scores, coins, DELTA, 0.95)
    assert one_run(np.exp(scores), coins, DELTA, 0.95) == result
    back = generator.permutation(101)
    assert one_run(scores[back], coins[back], DELTA, 0.95) == result
    assert one_run(-scores, ~coins, DELTA, 0.95).epsilon_audited == result.epsilon_audited
    assert one_run(-scores, coins, DELTA, 0.95).epsilon_audited == 0


def test_more_confidence_proves_less() -> None:
    coins = coins_of(200, np.random.default_rng(7))
    scores = gaussian(4.0)(coins, np.random.default_rng(8))
    bounds = [one_run(scores, coins, DELTA, confidence).epsilon_audited for confidence in (0.8, 0.95, 0.999)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1] > 0


def test_two_canaries_are_enough_to_say_nothing() -> None:
    result = one_run(np.array([0.0, 1.0]), np.array([False, True]), DELTA, 0.95)
    assert (result.canaries, result.correct, result.epsilon_audited) == (2, 2, 0.0)


@pytest.mark.parametrize(
    ("scores", "included", "fix"),
    [
        ([], [], "plant audit canaries"),
        ([1.0], [True], "plant audit canaries"),
        ([1.0, math.nan, 2.0], [True, False, True], "check the model's losses"),
        ([1.0, math.inf, 2.0], [True, False, True], "check the model's losses"),
        ([1.0, 2.0, 3.0], [True] * 3, "plant more audit canaries"),
        ([1.0, 2.0, 3.0], [False] * 3, "plant more audit canaries"),
    ],
)
def test_bad_input_is_refused_with_its_fix(scores: list[float], included: list[bool], fix: str) -> None:
    with pytest.raises(DataError, match=f"Fix: {fix}"):
        one_run(np.array(scores), np.array(included, dtype=bool), DELTA, 0.95)


def test_a_result_is_plain_json() -> None:
    result = audited(gaussian(1.0), 50, 0.95, np.random.default_rng(9))
    assert OneRun(**json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result
