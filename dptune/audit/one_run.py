"""Bounds on epsilon from the coins of one run's canaries, by the game of Steinke, Nasr and Jagielski 2023.

The run's true sample rate is bounded too, from how often planted gradients entered its batches.
A bound on epsilon from one run is too weak to detect that a draw takes units at twice their rate. This bounds the rate
directly: at each step, a canary in the data enters the batch with the true rate as probability, and its score then
grows by a known amount, unlike the score of a canary outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import mannwhitneyu

from dptune.audit.epsilon_bounds import gaussian_epsilon, one_run_mu, ranked_epsilon, ranked_weights
from dptune.core.digits import at_most
from dptune.core.errors import DataError
from dptune.privacy.entropy import Entropy, uniform

#: Part of the allowed failure probability for guessing all coins, which an attack needs that is always right, and for
#: guessing few, of which it may know each for sure. Weighted guesses have the rest.
A_QUARTER = 0.25
_FEW = 0.1


@dataclass(frozen=True)
class OneRun:
    """Lower bounds from one run's canaries.

    Attributes:
        canaries: m, number of coins flipped.
        included: number of coins that came up "in".
        guesses: number of coins guessed where the bound was best: the surest, which are weighted, few, or all.
        correct: number of right guesses.
        epsilon_audited: lower bound on epsilon at ``delta``, for any mechanism.
        mu_gaussian: lower bound on mu if the run is Gaussian DP; far below mu where most coins are guessed.
        epsilon_gaussian: epsilon of that mu at ``delta``: a bound under the same premise only.
        delta: delta of both epsilons.
        confidence: confidence of each bound.
        most: the largest ``epsilon_audited`` that this many canaries can show at this confidence, with every guess
            right. What a run's certificate is refuted by has a confidence of its own: see ``refutation``.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.one_run import one_run
        >>> coins = np.arange(1000) % 2 == 0
        >>> perfect = one_run(coins.astype(float), coins, delta=1e-5, confidence=0.95)  # an attack that is always right
        >>> perfect.correct, perfect.epsilon_audited == perfect.most
        (1000, True)
    """

    canaries: int
    included: int
    guesses: int
    correct: int
    epsilon_audited: float
    mu_gaussian: float
    epsilon_gaussian: float
    delta: float
    confidence: float
    most: float

    def to_dict(self) -> dict[str, float | int]:
        """The result in plain JSON types."""
        return asdict(self)


def one_run(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, confidence: float) -> OneRun:
    """Bound epsilon and mu by guessing "in" for the highest scores and "out" for as many of the lowest.

    Guarantee: with probability ``confidence`` over coins and run, the epsilon of the run's trained weights at
    ``delta``, under add/remove of one unit, is at least ``epsilon_audited``, if each canary is a unit of its own
    that its coin put into the data or left out (where a coin *replaced* a unit: of twice that epsilon). It holds for
    scores that are any function of the released weights, the candidates and public data, but not of the coins.

    Each bound is the best one of three ``plans`` that share the failure probability.

    Args:
        scores: (canaries,) scores, larger if the canary looks included. Private.
        included: (canaries,) results of the fair coins. Private.

    Raises: DataError without canaries, with scores that are not finite, or with coins that are all equal.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.one_run import one_run
        >>> coins = np.random.default_rng(1).random(1000) < 0.5
        >>> scores = coins + np.random.default_rng(2).normal(size=1000)
        >>> found = one_run(scores, coins, delta=1e-5, confidence=0.95)
        >>> found.guesses, found.correct, round(found.epsilon_audited, 2)
        (190, 170, 1.78)
    """
    right, canaries = right_guesses(scores, included), len(scores)

    def bounds(right: NDArray[np.bool_]) -> list[tuple[float, int, int, float]]:
        """Bounds of each plan on epsilon, with guesses and right ones, and on mu."""
        found = []
        for weights, part in plans(canaries):
            counted, sure = right[: len(weights)], 1 - (1 - confidence) * part
            epsilon = ranked_epsilon(canaries, weights, int(np.dot(weights, counted)), delta, sure)
            correct = int(counted.sum())
            found.append((epsilon, len(weights), correct, one_run_mu(canaries, len(weights), correct, sure)))
        return found

    found = bounds(right)
    epsilon, guesses, correct, _ = max(found)
    mu = max(one[-1] for one in found)
    return OneRun(
        canaries=canaries,
        included=int(np.sum(included)),
        guesses=guesses,
        correct=correct,
        epsilon_audited=epsilon,
        mu_gaussian=mu,
        epsilon_gaussian=gaussian_epsilon(mu, delta),
        delta=delta,
        confidence=confidence,
        most=max(bounds(np.ones_like(right)))[0],
    )


def plans(canaries: int) -> tuple[tuple[tuple[int, ...], float], ...]:
    """The ways to guess: the weights of the guesses, and the part of the allowed failure probability.

    The surest guesses count by their rank; those of few coins, and of all, count equally. All depend on the number of
    canaries alone, so no coin chooses them.

    Example:
        >>> from dptune.audit.one_run import plans
        >>> [(len(weights), part) for weights, part in plans(1000)]
        [(190, 0.5), (100, 0.25), (1000, 0.25)]
    """
    few, every = few_guesses(canaries), 2 * (canaries // 2)
    return (ranked_weights(canaries), 1 - 2 * A_QUARTER), ((1,) * few, A_QUARTER), ((1,) * every, A_QUARTER)


def few_guesses(canaries: int) -> int:
    """A tenth of the coins, as pairs; one pair at least.

    Example:
        >>> from dptune.audit.one_run import few_guesses
        >>> few_guesses(256)
        26
    """
    return max(2, 2 * round(canaries * _FEW / 2))


def right_guesses(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(guesses,) whether each guess is right: "in" for the highest score, "out" for the lowest, and so on inwards.

    Of an odd number of coins the middle one is not guessed. Raises: DataError as ``check_coins``.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.one_run import right_guesses
        >>> scores = np.array([0.1, 0.9, 0.4, 0.8])
        >>> right_guesses(scores, np.array([False, True, True, True]))
        array([ True,  True,  True, False])
    """
    included = np.asarray(included, dtype=bool)
    check_coins(scores, included)
    order, half = np.argsort(scores, kind="stable"), len(scores) // 2
    return np.stack([included[order[::-1][:half]], ~included[order[:half]]], axis=1).ravel()


def check_coins(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> None:
    """Raise DataError without canaries, for scores that are not finite, and for coins that are all equal.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.one_run import check_coins
        >>> check_coins(np.array([0.1, 0.9]), np.array([False, True]))
    """
    place = "one-run audit"
    if len(scores) < 2:
        raise DataError(f"{len(scores)} canaries", fix="plant audit canaries (canaries.audit)", file=place)
    if not np.isfinite(scores).all():
        raise DataError("a score is not finite", fix="check the model's losses", file=place)
    if included.all() or not included.any():
        # Fair coins are all equal with probability 2^(1 - m): more likely the secrets file is not the planted one.
        raise DataError("all coins are equal", fix="plant more audit canaries, by fair coins", file=place)


_POWER = 0.95  # probability with which an attack must succeed for a rate to count as detectable
_HALVINGS = 14
_MANY = 20  # number of canaries from which on rank sums are nearly normal


@dataclass(frozen=True)
class Unseen:
    """Result of an audit of the draw without power.

    Attributes:
        sample_rate: the rate that the ledger is charged for.
        reason: reason why the audit has no power, in words.
    """

    sample_rate: float
    reason: str

    @property
    def power(self) -> str:
        """The statement that the audit could have detected nothing, with the reason."""
        return f"NO POWER on the draw: {self.reason}"

    def to_dict(self) -> dict[str, float | str]:
        """The result in plain JSON types."""
        return {"sample_rate": self.sample_rate, "power": self.power}


@dataclass(frozen=True)
class SampleRate:
    """Bounds on the rate of one run's draw, from its releases.

    Attributes:
        sample_rate: the rate that the ledger is charged for.
        estimate: estimated rate at which a canary in the data entered a batch.
        audited: lower bound at the confidence that is reported.
        alarm: lower bound at the confidence of an alarm; above ``sample_rate`` it accuses the draw.
        refutable: true rate from which on the fault is detected in about 19 of 20 audits; above 1 if there is none.
    """

    sample_rate: float
    estimate: float
    audited: float
    alarm: float
    refutable: float

    def to_dict(self) -> dict[str, float | str]:
        """The result in plain JSON types, with the power in words."""
        return {**asdict(self), "power": self.power}

    @property
    def power(self) -> str:
        """The rates that the audit could have detected, in words."""
        if self.refutable > 1:
            return "NO POWER on the draw: canaries in every batch would look like these"
        return (
            f"could have refuted: a draw at a rate above {at_most(self.refutable)}, where "
            f"{at_most(self.sample_rate)} is charged"
        )


def audited_sample_rate(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    moves: Sequence[float],
    sample_rate: float,
    confidence: float,
    alarm: float,
    entropy: Entropy,
    bins: int = 0,
) -> SampleRate | Unseen:
    """Bound the rate of a draw from below.

    Guarantee: if at each step a canary that is in the data enters the batch independently with probability r, and all
    else in its coordinate is independent of its coin, each bound exceeds r with probability ``1 - confidence``
    (or ``1 - alarm``) at most. Proof: entries at rate r are simulated for canaries outside the data; scores and coins
    are then independent, and the rank sum of canaries in the data has the law of Mann and Whitney 1947, whatever the
    noise is. With balls in bins a canary enters one batch of each epoch, and is simulated so: by one entry an epoch,
    with the chance that its rate has left, and above that rate by more coins.

    Args:
        scores: (canaries,) scores of ``CraftedCanaries``, as are ``included`` and ``moves``.
        sample_rate: the rate that was charged.
        bins: number of batches in an epoch of balls_in_bins; 0 for a coin of its own at each step.

    Returns: ``Unseen`` if either side has no canary, a move is not known, or epochs of bins were not seen whole.
    """
    steps = np.asarray(moves, dtype=np.float64)
    if included.all() or not included.any():
        return Unseen(sample_rate, "the coins of all planted gradients fell alike")
    if not len(steps) or not (steps > 0).all():
        return Unseen(
            sample_rate,
            "how much a planted gradient moves a release is not known where the mechanism clips in other coordinates, "
            "or by the batch itself, or correlates its noise",
        )
    if bins and len(steps) % bins:
        return Unseen(sample_rate, "a process was killed, and which batches of an epoch it drew is not known")
    inside, outside = scores[included], scores[~included]
    coins = uniform(entropy, len(outside) * len(steps)).reshape(len(outside), len(steps))
    ties = uniform(entropy, len(scores))
    if bins:
        coins = _one_an_epoch(coins, bins, entropy)

    def p_value(rate: float) -> float:
        simulated = outside + np.where(coins < rate, steps, 0.0).sum(axis=1)
        return _rank_p_value(inside, simulated, ties)

    shift = float(inside.mean() - outside.mean())
    spread = float(np.sqrt(inside.var() / len(inside) + inside.var() / len(outside)))
    sees = float((ndtri(alarm) + ndtri(_POWER)) * spread / steps.sum())
    return SampleRate(
        sample_rate=sample_rate,
        estimate=shift / float(steps.sum()),
        audited=_largest_refuted(p_value, 1 - confidence),
        alarm=_largest_refuted(p_value, 1 - alarm),
        refutable=sample_rate + sees,
    )


def _one_an_epoch(coins: NDArray[np.float64], bins: int, entropy: Entropy) -> NDArray[np.float64]:
    """(canaries, steps) the rate from which on a canary enters each batch: of one batch an epoch below 1 / bins, of the
    others above.
    """
    whole = coins.reshape(len(coins), -1, bins)
    first = uniform(entropy, whole.shape[0] * whole.shape[1]).reshape(*whole.shape[:2], 1)
    chosen = np.arange(bins) == np.floor(first * bins)
    return np.where(chosen, whole / bins, 1 / bins + whole * (1 - 1 / bins)).reshape(coins.shape)


def _rank_p_value(inside: NDArray[np.float64], outside: NDArray[np.float64], ties: NDArray[np.float64]) -> float:
    """Probability of so high a rank sum if scores are independent of coins; ``ties`` breaks ties."""
    order = np.lexsort((ties, np.concatenate([inside, outside])))
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order))
    ranked, others = ranks[: len(inside)], ranks[len(inside) :]
    if min(len(ranked), len(others)) < _MANY:
        return float(mannwhitneyu(ranked, others, alternative="greater", method="exact").pvalue)
    # The normal law with the continuity correction is on the safe side: the exact tail is lighter.
    pairs = len(ranked) * len(others)
    above = ranked.sum() - len(ranked) * (len(ranked) - 1) / 2
    return float(ndtr(-(above - pairs / 2 - 0.5) / np.sqrt(pairs * (len(ranks) + 1) / 12)))


def _largest_refuted(p_value: Callable[[float], float], level: float) -> float:
    """The end of the range of rates, from 0 on, with p-values below ``level``, rounded down; 0 if it is empty."""
    if p_value(0.0) >= level:
        return 0.0
    low, high = 0.0, 1.0
    if p_value(high) < level:
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < level else (low, middle)
    return low
