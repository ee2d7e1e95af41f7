"""Lower bounds on epsilon from the right and wrong guesses of an attack, with their confidence. No model is involved.

Repeated runs: Clopper-Pearson bounds on the attack's two error rates. One run with many canaries: a bound of our own on
the game of Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846; ``ranked_p_value`` has its proof), and the f-DP bound of
Mahloujifar, Melis and Chaudhuri 2024 (2410.22235).
Each bound is wrong with probability ``1 - confidence`` at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import betaincinv, expit, log_ndtr, ndtr, ndtri
from scipy.stats import binom

from dptune.core.errors import ConfigError

_MOST_EPSILON = 1000.0
_MOST_MU = 100.0
_GUESSED = 6.0  # surest guesses that have a weight, over the square root of the canaries
_WEIGHT_STEPS = 4.0  # steps of a weight for each factor e between ranks


def rate_at_most(events: float, trials: int, confidence: float) -> float:
    """One-sided Clopper-Pearson upper bound on a probability, from ``events`` in ``trials`` (or an expected number).

    Example:
        >>> from dptune.audit.epsilon_bounds import rate_at_most
        >>> round(rate_at_most(events=0, trials=1000, confidence=0.95), 5)
        0.00299
    """
    _check_confidence(confidence)
    if not 0 <= events <= trials or trials == 0:
        raise ConfigError("events", f"{events} of {trials} is not a share", fix="count 0 or more of at least one trial")
    return 1.0 if events == trials else float(betaincinv(events + 1, trials - events, confidence))


def epsilon_from_errors(
    false_negatives: float, members: int, false_positives: float, others: int, delta: float, confidence: float
) -> float:
    """Lower bound on epsilon at ``delta`` from one attack's errors over independent runs.

    An (epsilon, delta)-DP mechanism obeys TPR <= e^epsilon FPR + delta and TNR <= e^epsilon FNR + delta
    (Kairouz, Oh and Viswanath 2015); each error rate is bounded with half of the allowed failure probability.
    Valid for every mechanism. The bound is at most about log(trials), so a larger one needs more trials.

    Example:
        >>> from dptune.audit.epsilon_bounds import epsilon_from_errors
        >>> round(epsilon_from_errors(5, 1000, 5, 1000, delta=1e-5, confidence=0.95), 3)
        4.443
    """
    _check_delta(delta)
    fnr, fpr = _error_rates(false_negatives, members, false_positives, others, confidence)
    ratios = [(1 - fnr - delta) / fpr, (1 - fpr - delta) / fnr]
    return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 0)])


def mu_from_errors(
    false_negatives: float, members: int, false_positives: float, others: int, confidence: float
) -> float:
    """Lower bound on mu of Gaussian DP from one attack's errors over independent runs.

    A mu-GDP mechanism obeys Phi^-1(1 - FPR) - Phi^-1(FNR) <= mu (Dong, Roth and Su 2022).

    Example:
        >>> from dptune.audit.epsilon_bounds import mu_from_errors
        >>> round(mu_from_errors(300, 1000, 300, 1000, confidence=0.95), 3)
        0.883
    """
    fnr, fpr = _error_rates(false_negatives, members, false_positives, others, confidence)
    return max(0.0, float(ndtri(1 - fpr) - ndtri(fnr)))


@lru_cache(maxsize=64)
def ranked_weights(canaries: int) -> tuple[int, ...]:
    """Weights of the surest guesses, the surest pair first: 4 log(guesses / rank), rounded, and 1 at least.

    The best weight of a guess is its log-odds beyond epsilon. About 6 sqrt(m) guesses have one, for Gaussian scores of
    mu from 0.5 to 3: fewer lose what is known of others, more add coins that are right by chance.

    Example:
        >>> from dptune.audit.epsilon_bounds import ranked_weights
        >>> ranked_weights(9)
        (6, 6, 3, 3, 1, 1, 1, 1)
    """
    pairs = max(1, min(canaries // 2, round(_GUESSED * math.sqrt(canaries) / 2)))
    each = np.maximum(np.rint(_WEIGHT_STEPS * np.log(pairs / np.arange(1, pairs + 1))), 1).astype(int)
    return tuple(each.repeat(2).tolist())


def ranked_p_value(canaries: int, weights: tuple[int, ...], score: int, epsilon: float, delta: float) -> float:
    """Bound on the chance that right guesses weigh ``score`` or more against any (epsilon, delta)-DP run.

    The attacker has the run's output and opens coins one after another, in any order and with any guesses that follow
    from the output and the coins already open; only the weight of each place in that order is fixed before. Write a for
    e^epsilon / (1 + e^epsilon), and q for the chance that the next guess is right, given all that the attacker has.

    1. The excesses (q - a)+ of all guesses have an expected sum of at most m delta (1 - a). With *every* other coin
       open an excess is no smaller on average (Jensen's inequality: q averages over closed coins). Then it comes from
       two runs P and Q that differ in this coin alone, and is on average, for the better guess, half the integral of
       ((1 - a) P - a Q)+ + ((1 - a) Q - a P)+. That is (1 - a) / 2 times the integral of (P - e^epsilon Q)+ +
       (Q - e^epsilon P)+, which is at most 2 delta.
    2. So guesses can be drawn together with independent coins of chance a such that at most F guesses are right where
       their coin is not heads, and F has an expectation of at most m delta (1 - a).

    The value is the largest probability of the score that such an F allows, were it free to mend the nearest misses of
    the independent coins. Theorem 5.2 of Steinke, Nasr and Jagielski (arXiv 2305.08846) takes F as independent of those
    coins, which a run can break: ``tests/audit/test_exact_games.py`` has one.

    Args:
        canaries: m, each included by its own fair coin.
        weights: positive weight of each guess, fixed before any coin is open.
        score: sum of the weights of the right guesses.

    Example:
        >>> from dptune.audit.epsilon_bounds import ranked_p_value
        >>> ranked_p_value(2, (1, 1), 2, epsilon=0.0, delta=0.0)  # two fair coins, both right
        0.25
    """
    _check_delta(delta)
    if not 0 < len(weights) <= canaries or min(weights) < 1 or not 0 <= score <= sum(weights):
        problem = f"a score of {score} for {len(weights)} guesses about {canaries} canaries cannot be"
        raise ConfigError("weights", problem, fix="guess at least one canary, none twice, with weights from 1 up")
    chance = np.ones(1)
    for weight, count in zip(*np.unique(weights, return_counts=True), strict=True):
        part = np.zeros(weight * count + 1)
        part[::weight] = binom.pmf(np.arange(count + 1), count, expit(epsilon))
        chance = np.convolve(chance, part)
    # Scores that miss, the nearest first, and the least number of further right guesses that would mend each.
    missed = chance[:score][::-1]
    further = 1 + np.searchsorted(np.cumsum(sorted(weights, reverse=True)), np.arange(1, score + 1))
    spent = np.cumsum(missed * further)
    budget = canaries * delta * expit(-epsilon)
    mended = int(np.searchsorted(spent, budget, side="right"))
    value = chance[score:].sum() + missed[:mended].sum()
    if mended < score:
        value += (budget - (spent[mended - 1] if mended else 0.0)) / further[mended]
    return float(min(1.0, value))


@lru_cache(maxsize=4096)
def ranked_epsilon(canaries: int, weights: tuple[int, ...], score: int, delta: float, confidence: float) -> float:
    """Lower bound on epsilon at ``delta`` from one run with coin-flipped canaries; arguments as ``ranked_p_value``.

    Example:
        >>> from dptune.audit.epsilon_bounds import ranked_epsilon
        >>> round(ranked_epsilon(1000, (1,) * 100, 95, delta=1e-5, confidence=0.95), 3)
        2.169
    """
    _check_confidence(confidence)
    return largest_rejected(
        lambda epsilon: ranked_p_value(canaries, weights, score, epsilon, delta) < 1 - confidence, _MOST_EPSILON
    )


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """Lower bound on epsilon at ``delta`` from one run with coin-flipped canaries, all guesses alike.

    Example:
        >>> from dptune.audit.epsilon_bounds import one_run_epsilon
        >>> round(one_run_epsilon(canaries=1000, guesses=100, correct=95, delta=1e-5, confidence=0.95), 3)
        2.169
    """
    _check_guesses(canaries, guesses, correct)
    return ranked_epsilon(canaries, (1,) * guesses, correct, delta, confidence)


@lru_cache(maxsize=4096)
def one_run_mu(canaries: int, guesses: int, correct: int, confidence: float) -> float:
    """Lower bound on mu from one run that is mu-GDP, tighter than one from epsilon; 2410.22235, algorithm 3.

    It only rejects Gaussian trade-off curves: converted to an epsilon, it is a bound for mechanisms whose whole curve
    is Gaussian, and an estimate for all others. ``one_run_epsilon`` needs no such premise.

    Example:
        >>> from dptune.audit.epsilon_bounds import one_run_mu
        >>> round(one_run_mu(canaries=1000, guesses=100, correct=95, confidence=0.95), 3)
        0.787
    """
    _check_guesses(canaries, guesses, correct)
    _check_confidence(confidence)
    return largest_rejected(
        lambda mu: coins_refute(
            lambda chance: float(ndtr(ndtri(chance) - mu)), canaries, guesses, correct, 1 - confidence
        ),
        _MOST_MU,
    )


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon at ``delta`` of a mu-GDP mechanism (Dong, Roth and Su 2022, corollary 2.13).

    Example:
        >>> from dptune.audit.epsilon_bounds import gaussian_epsilon
        >>> round(gaussian_epsilon(mu=1.0, delta=1e-5), 4)
        4.3772
    """
    _check_delta(delta)
    if mu <= 0:
        return 0.0
    if delta == 0:
        return math.inf

    def excess(epsilon: float) -> float:
        first = float(ndtr(mu / 2 - epsilon / mu))
        return first - math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))) - delta

    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * mu / 2 + mu * 40 + 1))


def coins_refute(
    other_side: Callable[[float], float], canaries: int, guesses: int, correct: int, significance: float
) -> bool:
    """Whether ``correct`` right guesses have a probability below ``significance`` under a trade-off curve; 2410.22235,
    algorithm 3.

    The recursion goes down from ``correct``: ``right`` and ``wrong`` bound the expected right and wrong guesses for
    each canary, over the runs with at least so many right guesses.

    Args:
        other_side: the curve: maps the probability of an event with a canary in to the least probability with the
            canary out, and the other way round.
    """
    right, wrong = significance * correct / canaries, significance * (guesses - correct) / canaries
    for index in range(correct - 1, -1, -1):
        raised = max(wrong, other_side(min(1.0, right)))
        if raised == wrong:
            break
        right += index / (guesses - index) * (raised - wrong)
        wrong = raised
    return right + wrong > guesses / canaries


def largest_rejected(rejected: Callable[[float], bool], most: float) -> float:
    """An end of the rejected range, rounded down; 0 if 0 is not rejected.

    A p-value may fall a little where its argument grows. That costs no confidence: what keeps the smaller value keeps
    the larger, so that whoever rejects the larger rejects both.
    """
    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejected(high):
        low, high = high, 2 * high
        if high > most:
            return low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def _error_rates(
    false_negatives: float, members: int, false_positives: float, others: int, confidence: float
) -> tuple[float, float]:
    each = 1 - (1 - confidence) / 2
    return rate_at_most(false_negatives, members, each), rate_at_most(false_positives, others, each)


def _check_guesses(canaries: int, guesses: int, correct: int) -> None:
    if not 0 <= correct <= guesses <= canaries or guesses == 0:
        problem = f"{correct} right of {guesses} guesses about {canaries} canaries cannot be"
        raise ConfigError("guesses", problem, fix="guess at least one canary, and none twice")


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise ConfigError("delta", f"{delta} is not in [0, 1)", fix="use 1e-5, say")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError("confidence", f"{confidence} is not in (0, 1)", fix="use 0.95, say")


# Thresholds that cut scores into "in" and "out", chosen by pilot trials, and the errors of the other trials.


_TAIL = 0.9
_CHOICE = 0.99  # confidence at which thresholds are compared on the pilot; no bound depends on it


@dataclass(frozen=True)
class Cuts:
    """The best thresholds for a bound on mu and for one on epsilon, and the bound on mu that the pilot itself gives."""

    for_mu: float
    for_epsilon: float
    promise: float


def best_cuts(
    inside: NDArray[np.float64], outside: NDArray[np.float64], trials: int, delta: float, confidence: float
) -> Cuts:
    """The thresholds that the pilot favours for ``trials`` trials in each world.

    For mu it is the threshold with the highest bound from the pilot's own few counts, so that none is chosen for luck
    in the tails; at a lower confidence, as ten trials show nothing at 0.999. For epsilon, which depends on the tails,
    it is the threshold whose bound would be highest if the trials err like the pilot's.
    """
    inside, outside = _numbers(inside, outside)
    scores = np.unique(np.quantile(np.concatenate([inside, outside]), np.linspace(0, 1, 201)))
    if len(scores) == 1:
        return Cuts(float(scores[0]), float(scores[0]), promise=0.0)  # no threshold tells equal scores apart
    cuts = (scores[1:] + scores[:-1]) / 2  # between scores: on one, rounding could break a tie
    promise, for_mu = max((mu_from_errors(*errors(inside, outside, cut), _CHOICE), float(cut)) for cut in cuts)
    shares = zip(cuts, _shares_above(-inside, -cuts), _shares_above(outside, cuts), strict=True)
    _, for_epsilon = max(
        (epsilon_from_errors(trials * missed, trials, trials * alarms, trials, delta, confidence), float(cut))
        for cut, missed, alarms in shares
    )
    return Cuts(for_mu, for_epsilon, promise)


def errors(inside: NDArray[np.float64], outside: NDArray[np.float64], cut: float) -> tuple[int, int, int, int]:
    """(missed, members, false alarms, others) when every score above ``cut`` is called "in", and nothing else is."""
    # ~(inside > cut), for NaN <= cut is false: a NaN would be called "in" in one world and "out" in the other.
    return int((~(inside > cut)).sum()), len(inside), int((outside > cut).sum()), len(outside)


def _numbers(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Replace NaN scores by one below all others: they are called "out" in both worlds, and no cut is NaN."""
    together = np.concatenate([inside, outside])
    finite = together[np.isfinite(together)]
    low, high = (finite.min() - 1, finite.max() + 1) if len(finite) else (0.0, 0.0)
    return tuple(np.nan_to_num(values, nan=low, neginf=low, posinf=high) for values in (inside, outside))


def _shares_above(values: NDArray[np.float64], cuts: NDArray[np.float64]) -> NDArray[np.float64]:
    """(cuts,) expected share of scores above each cut; where the pilot has few scores, from an exponential tail.

    A bound on epsilon depends on the rarest scores, of which the pilot has too few.
    """
    start = np.quantile(values, _TAIL)
    excess = (values[values > start] - start).mean() if (values > start).any() else 0.0
    above = (len(values) - np.searchsorted(np.sort(values), cuts, side="right")) / len(values)
    tail = (1 - _TAIL) * np.exp(-np.maximum(cuts - start, 0) / excess) if excess > 0 else 0.0
    return np.where(cuts <= start, above, tail)
