"""Bounds on epsilon from the coins of one run's canaries (Steinke, Nasr and Jagielski 2023, algorithm 1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import gaussian_epsilon, one_run_epsilon, one_run_mu
from dptune.core.errors import DataError

#: Shares of the coins that the attacker tries to guess. Fixed in advance; the bound accounts for trying them all.
GUESSED_SHARES = (1.0, 0.5, 0.25, 0.1)


@dataclass(frozen=True)
class OneRun:
    """Lower bounds from one run's canaries.

    Attributes:
        canaries: m, number of coins flipped.
        included: number of coins that came up "in".
        guesses: r, number of coins guessed where the bound was best; the attacker abstained from the others.
        correct: number of right guesses.
        epsilon_audited: lower bound on epsilon at ``delta``, for any mechanism.
        mu_gaussian: lower bound on mu if the run is Gaussian DP; far below mu where most coins are guessed.
        epsilon_gaussian: epsilon of that mu at ``delta``: a bound under the same premise only.
        delta: delta of both epsilons.
        confidence: confidence of each bound.
        most: the largest ``epsilon_audited`` that this many canaries can show at this confidence. What a run's
            certificate is refuted by has a confidence of its own: see ``refutation``.

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
    scores that are any function of the released weights, the candidates and public data, but not of the coins. The
    best of ``GUESSED_SHARES`` is reported, each tested with its share of the allowed failure probability.

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
        (100, 92, 1.63)
    """
    included = np.asarray(included, dtype=bool)
    check_coins(scores, included)
    canaries, each = len(scores), 1 - (1 - confidence) / len(GUESSED_SHARES)
    order = np.argsort(scores, kind="stable")
    counts = [guess(order, included, share) for share in GUESSED_SHARES]
    epsilon, guesses, correct = max((one_run_epsilon(canaries, r, v, delta, each), r, v) for r, v in counts)
    mu = max(one_run_mu(canaries, r, v, each) for r, v in counts)
    return OneRun(
        canaries=canaries,
        included=int(included.sum()),
        guesses=guesses,
        correct=correct,
        epsilon_audited=epsilon,
        mu_gaussian=mu,
        epsilon_gaussian=gaussian_epsilon(mu, delta),
        delta=delta,
        confidence=confidence,
        most=one_run_epsilon(canaries, counts[0][0], counts[0][0], delta, each),
    )


def guess(order: NDArray[np.int64], included: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """Number of guesses, half "in" and half "out", and number of right ones.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.one_run import guess
        >>> scores = np.array([0.1, 0.9, 0.4, 0.8])
        >>> guess(np.argsort(scores), np.array([False, True, True, True]), share=1.0)
        (4, 3)
    """
    half = max(1, int(len(order) * share / 2))
    low, high = order[:half], order[len(order) - half :]
    return 2 * half, int((~included[low]).sum() + included[high].sum())


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
