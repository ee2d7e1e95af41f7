"""Test of a run's certificate by the coins of its canaries, and what it could have refuted.

At delta 1e-5 a lower bound on epsilon cannot accuse at confidence 1 - 1e-5, whatever the number of canaries: with
probability delta the certified run may betray every coin. So the whole certified trade-off curve is tested, which
promises more at every smaller delta: Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235, algorithm 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import coins_refute, gaussian_epsilon, one_run_mu
from dptune.audit.one_run import GUESSED_SHARES, check_coins, guess
from dptune.audit.verdict import DELTAS, Certificate
from dptune.core.digits import at_least, at_most
from dptune.privacy.release import Composition
from dptune.privacy.run_header import RunHeader


def run_certificate(header: RunHeader, releases: Composition) -> Certificate:
    """The certificate of a whole run: what its header certifies of these releases at several deltas."""
    epsilon = header.price(releases).certified
    if math.isinf(epsilon):
        return Certificate(epsilon, None)
    others = ((replace(header, delta=one).price(releases).certified, one) for one in DELTAS if one != header.delta)
    pairs = [(epsilon, header.delta), *others]
    return Certificate(epsilon, None, tuple(pair for pair in pairs if math.isfinite(pair[0])))


@dataclass(frozen=True)
class Refutation:
    """The comparison of one run's coins with its certificate.

    Attributes:
        certified: certified epsilon; infinite if nothing is certified.
        confidence: confidence of an accusation, over all numbers of guesses that were tried.
        guesses: number of guesses that accuse; where none does, the largest that could have.
        correct: number of right guesses among them.
        needed: least number of right ones among them that refutes the certificate; None if not even all would.
        epsilon_refutable: the largest epsilon that these canaries could have refuted, with every coin guessed right:
            of a Gaussian run, and that of this certificate if it is larger; 0 if they could not have refuted this one.
    """

    certified: float
    confidence: float
    guesses: int
    correct: int
    needed: int | None
    epsilon_refutable: float

    @property
    def refuted(self) -> bool:
        """Whether the certificate is refuted: the mechanism, its accountant or its data handling is wrong."""
        return self.needed is not None and self.correct >= self.needed

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence; None if the coins are compatible with what is certified."""
        if not self.refuted:
            return None
        chance = at_most(1 - self.confidence, 2)
        return (
            f"guesses {self.correct} of {self.guesses} coins right, where the certified epsilon "
            f"{at_most(self.certified)} allows {self.needed} or more with a chance below {chance}"
        )

    @property
    def power(self) -> str:
        """What the coins could have refuted, in words."""
        if math.isinf(self.certified):
            return "nothing finite is certified, so there is nothing to refute"
        if self.needed is None:
            return f"NO POWER on epsilon: too few coins, it cannot refute the certified {at_most(self.certified)}"
        could = f"could have refuted the certified epsilon {at_most(self.certified)}, and any up to "
        by = f"by {self.needed} of {self.guesses} right guesses; {self.correct} were right"
        return f"{could}{at_least(self.epsilon_refutable)}: {by}"

    def to_dict(self) -> dict[str, float | str | None]:
        """The figures in plain JSON types, and the power in words."""
        return {
            "alarm_guesses": self.guesses,
            "alarm_correct": self.correct,
            "alarm_needed": self.needed,
            "epsilon_refutable": self.epsilon_refutable,
            "accusation": self.accusation,
            "power": self.power,
        }


def refutation(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    certificate: Certificate,
    delta: float,
    confidence: float,
) -> Refutation:
    """Compare coins with a run's certificate, by guesses as ``one_run`` makes them.

    Guarantee: if the run keeps the certificate, for one canary in or out, it is refuted with probability ``1 -
    confidence`` at most, over coins and run. Each of ``GUESSED_SHARES`` has its share of that probability.

    Args:
        scores: (canaries,) scores, larger if the canary looks included. Private.
        included: (canaries,) results of the fair coins. Private.
        delta: of the epsilon in ``epsilon_refutable``.

    Raises: DataError as ``one_run``.
    """
    included = np.asarray(included, dtype=bool)
    check_coins(scores, included)
    canaries, each = len(scores), 1 - (1 - confidence) / len(GUESSED_SHARES)
    order = np.argsort(scores, kind="stable")
    counts = [guess(order, included, share) for share in GUESSED_SHARES]
    needed = [_needed(certificate, canaries, guesses, 1 - each) for guesses, _ in counts]
    able = [at for at, least in enumerate(needed) if least is not None]
    accusing = [at for at in able if counts[at][1] >= (needed[at] or 0)]
    best = (*accusing, *able, 0)[0]
    could = math.isinf(certificate.epsilon) or bool(able)
    most = max(one_run_mu(canaries, guesses, guesses, each) for guesses, _ in counts)
    finite = certificate.epsilon if math.isfinite(certificate.epsilon) else 0.0
    return Refutation(
        certified=certificate.epsilon,
        confidence=confidence,
        guesses=counts[best][0],
        correct=counts[best][1],
        needed=needed[best],
        epsilon_refutable=max(finite, gaussian_epsilon(most, delta)) if could else 0.0,
    )


def _needed(certificate: Certificate, canaries: int, guesses: int, significance: float) -> int | None:
    """The least number of right guesses that refutes the certificate; None if not even all do."""

    def least_chance(chance: float) -> float:
        return certificate.least_false_negatives(1 - chance)

    def refutes(correct: int) -> bool:
        return coins_refute(least_chance, canaries, guesses, correct, significance)

    if math.isinf(certificate.epsilon) or not refutes(guesses):
        return None
    low, high = guesses // 2 - 1, guesses  # half of the guesses are right by chance
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if refutes(middle) else (middle, high)
    return high
