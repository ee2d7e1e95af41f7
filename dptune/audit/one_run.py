"""epsilon_audited from the coins of one run's canaries (Steinke, Nasr and Jagielski 2023, algorithm 1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from dptune.audit.bounds import gaussian_epsilon, one_run_epsilon, one_run_mu
from dptune.errors import DataError

#: How many of the coins the attacker guesses. Fixed in advance; the bound pays for looking at all of them.
GUESSED_SHARES = (1.0, 0.5, 0.25, 0.1)


@dataclass(frozen=True)
class OneRun:
    """What one run's canaries prove.

    Attributes:
        canaries: m, coins flipped.
        included: how many came up "in".
        guesses: r, coins guessed where the bound was best; the others were abstained from.
        correct: how many of those were right.
        epsilon_audited: lower bound on epsilon at ``delta``, for any mechanism.
        mu_gaussian: lower bound on mu if the run is Gaussian DP; far below mu where most coins are guessed.
        epsilon_gaussian: what that mu means at ``delta``: a bound under the same premise only.
        delta: of both epsilons.
        confidence: of each bound.
        most: the largest ``epsilon_audited`` that this many canaries can show.
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
        """Plain JSON types."""
        return asdict(self)


def one_run(scores: NDArray[np.float64], included: NDArray[np.bool_], delta: float, confidence: float) -> OneRun:
    """Guess "in" for the highest scores and "out" for the lowest, as many of each, and count.

    Guarantee: with probability ``confidence`` over coins and run, the epsilon of the run's trained weights at
    ``delta``, under add/remove of one unit, is at least ``epsilon_audited``, if each canary is a unit of its own
    that its coin put into the data or left out (where a coin *replaced* a unit: of twice that epsilon). Holds for
    scores that are any function of the released weights, the candidates and public data, but not of the coins. The
    best of ``GUESSED_SHARES`` is reported, each tested with its share of what may go wrong.

    Args:
        scores: (canaries,) larger where the canary looks included. Private.
        included: (canaries,) what the fair coins said. Private.

    Raises: DataError without canaries, with scores that are not finite, or with coins that are all equal.
    """
    included = np.asarray(included, dtype=bool)
    _check(scores, included)
    canaries, each = len(scores), 1 - (1 - confidence) / len(GUESSED_SHARES)
    order = np.argsort(scores, kind="stable")
    counts = [_guess(order, included, share) for share in GUESSED_SHARES]
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


def _guess(order: NDArray[np.int64], included: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """(guesses, right ones), half of them "in" and half "out"."""
    half = max(1, int(len(order) * share / 2))
    low, high = order[:half], order[len(order) - half :]
    return 2 * half, int((~included[low]).sum() + included[high].sum())


def _check(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> None:
    place = "one-run audit"
    if len(scores) < 2:
        raise DataError(f"{len(scores)} canaries", fix="plant audit canaries (canaries.audit)", file=place)
    if not np.isfinite(scores).all():
        raise DataError("a score is not finite", fix="check the model's losses", file=place)
    if included.all() or not included.any():
        # Fair coins do this with probability 2^(1 - m): the secrets file is not what was planted.
        raise DataError("all coins are equal", fix="plant more audit canaries, by fair coins", file=place)
