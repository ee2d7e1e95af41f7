"""Test of a run's certificate by the coins of its canaries, and what it could have refuted.

A lower bound on epsilon at its delta cannot accuse where a false alarm may have about the chance delta, whatever the
number of canaries: with probability delta the certified run may betray every coin. So the whole certified trade-off
curve is tested, which promises more at every smaller delta: Mahloujifar, Melis and Chaudhuri 2024 (arXiv 2410.22235,
algorithm 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr

from dptune.audit.epsilon_bounds import coins_refute, gaussian_epsilon, one_run_mu
from dptune.audit.one_run import A_QUARTER, few_guesses, right_guesses
from dptune.audit.verdict import DELTAS, Certificate, certified_pairs
from dptune.core.digits import at_least, at_most
from dptune.privacy.accounting.sampled_gaussian import gdp_delta
from dptune.privacy.release import Composition
from dptune.privacy.run_header import RunHeader

#: Shares of the coins among which the number of guesses is chosen.
_SHARES = tuple(2 ** (-step / 2) for step in range(9))
_MOST_MU = 20.0
#: The most canaries for which it is asked whether they could refute a certificate.
_MOST_COINS = 1 << 16


def run_certificate(header: RunHeader, releases: Composition) -> Certificate:
    """The certificate of a whole run: what its header certifies of these releases at several deltas."""
    epsilon = header.price(releases).certified
    if math.isinf(epsilon):
        return Certificate(epsilon, None)
    deltas = (one for one in DELTAS if one != header.delta)
    others = certified_pairs(lambda one: replace(header, delta=one).price(releases).certified, deltas)
    return Certificate(epsilon, None, ((epsilon, header.delta), *others))


def gaussian_certificate(epsilon: float, delta: float) -> Certificate:
    """The certificate of releases with a Gaussian curve, of which one epsilon is known.

    Example:
        >>> from dptune.audit.refutation import gaussian_certificate
        >>> round(gaussian_certificate(2.0, 1e-5).mu, 3)
        0.502
    """
    mu = brentq(lambda one: gdp_delta(one, epsilon) - delta, 1e-6, math.sqrt(2 * epsilon) + 2 * _MOST_MU)
    return Certificate(epsilon, float(mu))


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
        too_few: a sentence if they could not have refuted this certificate, as ``coins_too_few`` has it; else empty.
    """

    certified: float
    confidence: float
    guesses: int
    correct: int
    needed: int | None
    epsilon_refutable: float
    too_few: str = ""

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
            return f"NO POWER on epsilon: {self.too_few}"
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
    """Compare coins with a run's certificate, by a few numbers of surest guesses.

    Guarantee: if the run keeps the certificate, for one canary in or out, it is refuted with probability ``1 -
    confidence`` at most, over coins and run. The numbers of guesses share that probability, and depend on the
    certificate and on the number of canaries alone.

    Args:
        scores: (canaries,) scores, larger if the canary looks included. Private.
        included: (canaries,) results of the fair coins. Private.
        delta: of the epsilon in ``epsilon_refutable``.

    Raises: DataError as ``one_run``.
    """
    right, canaries = right_guesses(scores, included), len(scores)
    tried = _plans(certificate, canaries, 1 - confidence)
    counts = [(guesses, int(right[:guesses].sum())) for guesses, _ in tried]
    needed = [_needed(certificate, canaries, *one) for one in tried]
    able = [at for at, least in enumerate(needed) if least is not None]
    accusing = [at for at in able if counts[at][1] >= (needed[at] or 0)]
    best = (*accusing, *able, 0)[0]
    could = math.isinf(certificate.epsilon) or bool(able)
    most = max(one_run_mu(canaries, guesses, guesses, 1 - chance) for guesses, chance in tried)
    finite = certificate.epsilon if math.isfinite(certificate.epsilon) else 0.0
    return Refutation(
        certified=certificate.epsilon,
        confidence=confidence,
        guesses=counts[best][0],
        correct=counts[best][1],
        needed=needed[best],
        epsilon_refutable=max(finite, gaussian_epsilon(most, delta)) if could else 0.0,
        too_few="" if could else coins_too_few(canaries, certificate, confidence),
    )


def coins_too_few(canaries: int, certificate: Certificate, confidence: float) -> str:
    """A sentence if the coins of so many canaries cannot refute a certificate, even if each is guessed right.

    It says about how many could. It is empty if they can, or if nothing finite is certified.

    Example:
        >>> from dptune.audit.refutation import coins_too_few
        >>> from dptune.audit.verdict import Certificate
        >>> coins_too_few(10, Certificate(1.0, mu=0.25), confidence=0.999)
        '10 canaries are too few to refute the certified epsilon 1, even if every coin is guessed right; about 16 could'
        >>> coins_too_few(100, Certificate(1.0, mu=0.25), confidence=0.999)
        ''
    """
    if math.isinf(certificate.epsilon) or _can_refute(canaries, certificate, confidence):
        return ""
    few, enough = canaries, 2 * canaries
    while enough <= _MOST_COINS and not _can_refute(enough, certificate, confidence):
        few, enough = enough, 2 * enough
    said = f"{canaries} canaries are too few to refute the certified epsilon {at_most(certificate.epsilon)}, even if "
    if enough > _MOST_COINS:
        return f"{said}every coin is guessed right; so are {few}"
    while enough - few > max(1, few // 50):
        middle = (few + enough) // 2
        few, enough = (few, middle) if _can_refute(middle, certificate, confidence) else (middle, enough)
    step = 10 ** max(0, len(str(enough)) - 2)  # rounded up to two digits
    return f"{said}every coin is guessed right; about {-(-enough // step) * step} could"


def _can_refute(canaries: int, certificate: Certificate, confidence: float) -> bool:
    """Whether canaries refute a certificate if every coin is guessed right."""
    tried = _plans(certificate, canaries, 1 - confidence)
    return any(_needed(certificate, canaries, *one) is not None for one in tried)


def _plans(certificate: Certificate, canaries: int, chance: float) -> list[tuple[int, float]]:
    """Numbers of guesses, each with its part of the allowed chance of a false alarm.

    A quarter is for all coins (an attack may always be right), a quarter for a tenth of them if these could refute the
    certificate (it may know few coins, for sure). The rest has the number that sees the least excess: by Gaussian
    scores, the smallest mu whose expected right guesses refute the certificate.
    """
    every, few = 2 * (canaries // 2), few_guesses(canaries)
    parts = {every: chance * A_QUARTER}
    if _needed(certificate, canaries, few, parts[every]) is not None:
        parts[few] = parts[every]
    rest = chance - sum(parts.values())
    mus = {}
    for guesses in {max(2, 2 * round(every * share / 2)) for share in _SHARES}:
        needed = _needed(certificate, canaries, guesses, rest)
        if needed is not None:
            mus[guesses] = _mu_that_gets(needed / guesses, guesses / canaries)
    if mus:
        best = min(mus, key=lambda guesses: mus[guesses])
        parts[best] = parts.get(best, 0.0) + rest
    return list(parts.items())


def _mu_that_gets(right: float, share: float) -> float:
    """The mu at which this share of coins, those with the outermost Gaussian scores, is guessed right so often."""

    def gets(mu: float) -> float:
        # Scores of canaries that are in have the mean mu / 2, of the others -mu / 2. This share of all scores is
        # above the edge or below its negative.
        edge = brentq(lambda at: ndtr(mu / 2 - at) + ndtr(-mu / 2 - at) - share, 0.0, mu / 2 + 9)
        return float(ndtr(mu / 2 - edge) / share)

    if gets(_MOST_MU) < right:
        return math.inf
    return float(brentq(lambda mu: gets(mu) - right, 0.0, _MOST_MU, xtol=1e-3))


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
