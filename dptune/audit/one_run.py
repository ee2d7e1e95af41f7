"""Bounds on epsilon from the coins of one run's canaries, by the game of Steinke, Nasr and Jagielski 2023."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import gaussian_epsilon, one_run_mu, ranked_epsilon, ranked_weights
from dptune.core.errors import DataError

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
