"""Bounds from one run's coins against the worst run there is, found by a linear program over all runs of a few coins.

A run is a table: the probability of each of the attacker's answers, for each way that the coins fell. That it keeps
(epsilon, delta) pairs is linear in the table, and so is the chance that the answer scores. No code of the bounds is
used to find the worst one.
"""

from __future__ import annotations

import math
from itertools import combinations, permutations, product

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_array

from dptune.audit.epsilon_bounds import coins_refute, ranked_p_value
from dptune.audit.verdict import Certificate

Pairs = tuple[tuple[float, float], ...]
#: An answer: for each coin its weight, positive to guess "in", negative for "out", 0 to abstain.
Answer = tuple[int, ...]


def answers(coins: int, weights: tuple[int, ...]) -> list[Answer]:
    """All answers that give these weights to some of the coins."""
    found = set()
    for places in permutations(range(coins), len(weights)):
        for signs in product((1, -1), repeat=len(weights)):
            answer = [0] * coins
            for place, weight, sign in zip(places, weights, signs, strict=True):
                answer[place] = sign * weight
            found.add(tuple(answer))
    return sorted(found)


def worst_chance(coins: int, weights: tuple[int, ...], score: int, pairs: Pairs) -> float:
    """The largest chance of this score over all runs that keep all the pairs about each coin."""
    told = answers(coins, weights)
    falls = list(product((False, True), repeat=coins))
    at = {(fall, answer): i for i, (fall, answer) in enumerate(product(falls, told))}
    gain = np.zeros(len(at))
    for (fall, answer), i in at.items():
        right = sum(abs(weight) for weight, coin in zip(answer, fall, strict=True) if weight and (weight > 0) == coin)
        gain[i] = (right >= score) / len(falls)
    # Above e^epsilon times the neighbour's probability an answer's probability is excess; delta bounds its sum.
    rows, columns, values, limits, extra = [], [], [], [], len(at)
    for fall, coin, (epsilon, delta) in product(falls, range(coins), pairs):
        other = (*fall[:coin], not fall[coin], *fall[coin + 1 :])
        first = extra
        for answer in told:
            rows += [len(limits)] * 3
            columns += [at[fall, answer], at[other, answer], extra]
            values += [1.0, -math.exp(epsilon), -1.0]
            limits.append(0.0)
            extra += 1
        rows += [len(limits)] * len(told)
        columns += range(first, extra)
        values += [1.0] * len(told)
        limits.append(delta)
    bounds = coo_array((values, (rows, columns)), shape=(len(limits), extra)).tocsr()
    sums = coo_array(
        (np.ones(len(at)), ([falls.index(fall) for fall, _ in at], list(at.values()))), shape=(len(falls), extra)
    ).tocsr()
    objective = np.concatenate([-gain, np.zeros(extra - len(at))])
    found = linprog(objective, A_ub=bounds, b_ub=limits, A_eq=sums, b_eq=np.ones(len(falls)), method="highs")
    assert found.status == 0
    return float(-found.fun)


PURE: Pairs = ((1.0, 0.0),)
JOINT: Pairs = ((0.5, 0.1),)
CURVE: Pairs = ((0.0, 0.35), (1.0, 0.1), (2.0, 0.01))
GAMES = [
    (coins, guesses, correct)
    for coins, guesses in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 2))
    for correct in range(1, guesses + 1)
]


@pytest.mark.parametrize(("coins", "guesses", "correct"), GAMES)
@pytest.mark.parametrize("pairs", [PURE, JOINT, CURVE], ids=["pure", "joint delta", "curve"])
def test_no_run_that_keeps_its_curve_beats_a_bound(coins: int, guesses: int, correct: int, pairs: Pairs) -> None:
    """Both bounds: by the whole curve, and at each pair by the p-value with equal weights."""
    worst = worst_chance(coins, (1,) * guesses, correct, pairs)
    curve = Certificate(1.0, None, pairs)

    def refutes(chance: float) -> bool:
        return coins_refute(lambda rate: curve.least_false_negatives(1 - rate), coins, guesses, correct, chance)

    assert not refutes(worst * (1 - 1e-6))
    for epsilon, delta in pairs:
        assert worst <= ranked_p_value(coins, (1,) * guesses, correct, epsilon, delta) + 1e-9


@pytest.mark.parametrize("guesses", [1, 2, 3])
def test_the_worst_run_without_delta_answers_each_coin_by_itself(guesses: int) -> None:
    """Randomised response: the p-value is met exactly, so no smaller one would be true."""
    for correct in range(1, guesses + 1):
        worst = worst_chance(3, (1,) * guesses, correct, PURE)
        assert worst == pytest.approx(ranked_p_value(3, (1,) * guesses, correct, *PURE[0]), abs=1e-9)


@pytest.mark.parametrize("weights", [(2, 1), (3, 1), (3, 2, 1), (2, 2, 1)])
@pytest.mark.parametrize("pair", [(1.0, 0.0), (0.5, 0.1), (0.0, 0.2), (2.0, 0.03)])
def test_no_run_beats_a_ranked_bound_by_choosing_the_order(weights: tuple[int, ...], pair: tuple[float, float]) -> None:
    """The attacker gives the weights to coins by what the run says, and may abstain from one of three."""
    for score in range(1, sum(weights) + 1):
        assert worst_chance(3, weights, score, (pair,)) <= ranked_p_value(3, weights, score, *pair) + 1e-9


def test_a_delta_that_is_spent_at_once_breaks_a_bound_that_forgets_it() -> None:
    """The program does find runs that betray all coins together: the bound for delta 0 is beaten by them."""
    worst = worst_chance(3, (1, 1, 1), 3, JOINT)
    assert worst > ranked_p_value(3, (1, 1, 1), 3, JOINT[0][0], 0.0) + 0.05


@pytest.mark.parametrize("guesses", [2, 4, 6])
def test_randomised_response_by_counting_all_its_answers(guesses: int) -> None:
    """All ways that up to six guesses can be right, each with its chance: without delta the p-value is exact."""
    epsilon, weights = 0.7, (5, 3, 2, 2, 1, 1)[:guesses]
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    chances = {
        chosen: keep ** len(chosen) * (1 - keep) ** (guesses - len(chosen))
        for size in range(guesses + 1)
        for chosen in combinations(range(guesses), size)
    }
    for score in range(sum(weights) + 1):
        exact = sum(chance for chosen, chance in chances.items() if sum(weights[i] for i in chosen) >= score)
        assert ranked_p_value(6, weights, score, epsilon, 0.0) == pytest.approx(min(1.0, exact), abs=1e-12)


def test_the_published_theorem_is_beaten_where_delta_follows_the_coins() -> None:
    """Randomised response of three coins, but never all wrong: that answer's chance goes to the three nearest ones.

    It is (1, 0.1)-DP, as is counted here, and at least one guess is always right. By theorem 5.2 of 2305.08846 that has
    a probability of 0.9922 at most.
    """
    epsilon, delta, coins = 1.0, 0.1, 3
    keep = math.exp(epsilon) / (1 + math.exp(epsilon))
    chance = np.array([keep**right * (1 - keep) ** (coins - right) for right in range(coins + 1)])
    chance[1] += chance[0] / 3
    chance[0] = 0.0
    assert sum(math.comb(coins, right) * chance[right] for right in range(coins + 1)) == pytest.approx(1.0)
    # The other two guesses have 0, 1 or 2 right, in 1, 2 or 1 ways. A flip of this coin moves that number by one.
    both = ((chance[1:], chance[:-1]), (chance[:-1], chance[1:]))
    excess = [np.dot([1, 2, 1], np.maximum(here - math.exp(epsilon) * there, 0)) for here, there in both]
    assert 0.0593 < sum(excess) < 0.0594 < delta
    right = np.array([math.comb(coins, right) * keep**right * (1 - keep) ** (coins - right) for right in range(4)])
    published = (1 - right[0]) + 2 * coins * delta * right[0]
    assert published < 0.9923 < 1.0 == pytest.approx(ranked_p_value(coins, (1,) * 3, 1, epsilon, delta))
