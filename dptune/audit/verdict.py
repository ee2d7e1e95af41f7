"""What is certified of an audited step, what the attack may refute of it, and the accusation if it does.

An attack's false positive and false negative rates are a point; what is certified is a curve that no such point may lie
below. Each rate has an upper confidence bound, and the curve falls, so a pair of bounds below it refutes it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from dptune.audit.bounds import epsilon_from_errors, mu_from_errors, rate_at_most
from dptune.audit.step import StepAudit
from dptune.privacy.accountants import epsilons
from dptune.privacy.mixture_bounds import gaussian_dp_multiplier
from dptune.privacy.parts import disjoint
from dptune.privacy.release import Composition

#: How often an attack must succeed to be said to see something.
_POWER = 0.95
_DELTAS = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4)
_MOST_EXCESS = 1e3
_LARGEST_EPSILON = 700.0
_CUTS = np.linspace(0.05, 0.95, 37)
CHECKS = 2  # on mu and on epsilon


@dataclass(frozen=True)
class Certificate:
    """The trade-off function that is certified of some releases.

    Attributes:
        epsilon: at the audit's delta; infinite where nothing is certified.
        mu: where the function is that of Gaussian DP; None where it is not, or nothing is certified.
        pairs: (epsilon, delta), each certified; they bound the function where it is not Gaussian.
        is_gaussian: whether an attack can reach ``mu``; that of a Laplace mixture is only a bound.
    """

    epsilon: float
    mu: float | None
    pairs: tuple[tuple[float, float], ...] = ()
    is_gaussian: bool = True

    def least_false_negatives(self, false_positives: float) -> float:
        """The least false negative rate that the certificate allows at this false positive rate."""
        if self.mu is not None:
            return float(ndtr(ndtri(1 - false_positives) - self.mu))
        bounds = (
            max(1 - delta - math.exp(epsilon) * false_positives, (1 - delta - false_positives) * math.exp(-epsilon))
            for epsilon, delta in self.pairs
            if epsilon < _LARGEST_EPSILON  # beyond, both are next to nothing and exp overflows
        )
        return max([0.0, *bounds])

    def mu_at(self, false_positives: float) -> float:
        """``mu``, or that of the Gaussian trade-off function through the certified one's point at this rate; infinite
        where nothing is certified.
        """
        if self.mu is not None:
            return self.mu
        allowed = self.least_false_negatives(false_positives)
        return float(ndtri(1 - false_positives) - ndtri(allowed)) if allowed > 0 else math.inf


def certificate(composition: Composition, delta: float) -> Certificate:
    """What is certified of releases about one unit; of releases about disjoint parts of the units, of the dearest part.

    Certain Gaussian releases are Gaussian DP exactly: mu^2 is the sum of (sensitivity / noise)^2. Others have no single
    mu: their trade-off function is bounded by the epsilons that the accountant certifies at several deltas.
    """
    moves = any(release.adaptive for release in composition) and sum(composition.values()) > 1
    if moves or any(release.leaks for release in composition):
        return Certificate(math.inf, None)
    # A single release is fixed before its step, whatever chose its noise.
    fixed = Counter({replace(release, adaptive=False): count for release, count in composition.items()})
    epsilon = epsilons(fixed, delta).certified
    if all(release.sample_rate == 1.0 for release in fixed):
        is_gaussian = all(release.law is None for release in fixed)
        return Certificate(epsilon, max(_mu(part) for part in disjoint(fixed)), is_gaussian=is_gaussian)
    pairs = ((epsilons(fixed, one).certified, one) for one in _DELTAS)
    return Certificate(epsilon, None, tuple(pair for pair in pairs if math.isfinite(pair[0])))


def _mu(composition: Composition) -> float:
    return math.sqrt(sum(count / gaussian_dp_multiplier(one) ** 2 for one, count in composition.items()))


@dataclass(frozen=True)
class Verdict:
    """What an audit says about a certificate.

    Attributes:
        false_alarms: the chance of an accusation where the certificate is true, over all checks that share it.
        confidence: of each check by itself.
        mu_alarm, epsilon_alarm: lower bounds at that confidence.
        mu_certified, epsilon_certified: what they must not exceed; infinite where nothing is certified.
        mu_refutable, epsilon_refutable: the largest that these trials could refute: no error in any of them.
        mu_detectable: a true mu from here on is refuted in 19 of 20 audits: by the best attack where what is certified
            is Gaussian, else at this attack's false positive rate; infinite if none is.
        noise_detectable: the same for a Gaussian certificate as noise: below this multiple of what is charged; 0 if
            none is; None where there is no single mu.
    """

    false_alarms: float
    confidence: float
    mu_alarm: float
    epsilon_alarm: float
    mu_certified: float
    epsilon_certified: float
    mu_refutable: float
    epsilon_refutable: float
    mu_detectable: float
    noise_detectable: float | None

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence, or None where the attack shows no more than is certified."""
        for name in ("mu", "epsilon"):
            shown, certified = getattr(self, f"{name}_alarm"), getattr(self, f"{name}_certified")
            if shown > certified:
                return (
                    f"the attack shows {name} >= {shown:.4g} at confidence {self.confidence:.6g}, but {certified:.4g} "
                    "is certified: the mechanism or its accountant is wrong"
                )
        return None

    @property
    def power(self) -> str:
        """What the audit could have seen, in words."""
        if math.isinf(self.epsilon_certified) and math.isinf(self.mu_certified):
            return "nothing finite is certified, so there is nothing to refute"
        return f"{self._power_on_mu}; {self._power_on_epsilon}"

    @property
    def _power_on_mu(self) -> str:
        if math.isinf(self.mu_detectable):
            return f"NO POWER on mu: these trials show at most {self.mu_refutable:.3g}, with no error in any of them"
        sees = f"a mu of {self.mu_detectable:.3g} or more is refuted in 19 of 20 audits"
        if self.noise_detectable is None:
            return sees
        return f"{sees} at best: noise below {self.noise_detectable:.3g} times what is charged"

    @property
    def _power_on_epsilon(self) -> str:
        if self.epsilon_refutable <= self.epsilon_certified:
            return f"NO POWER on epsilon: these trials refute at most {self.epsilon_refutable:.3g}"
        return f"a certified epsilon below {self.epsilon_refutable:.3g} can be refuted"

    def to_dict(self) -> dict[str, float | str | None]:
        """All of it, and the power in words."""
        figures = asdict(self)
        alarms = {"false_alarms": figures.pop("false_alarms"), "alarm_confidence": figures.pop("confidence")}
        return {**alarms, **figures, "power": self.power}


def judged(found: StepAudit, certified: Certificate, false_alarms: float, checks: int = CHECKS) -> Verdict:
    """Compare an audit with what is certified.

    Guarantee: if the certificate is true, any of this audit's checks accuses with probability ``false_alarms * CHECKS /
    checks`` at most, over the audit's coins and noise.

    Args:
        false_alarms: that ``checks`` comparisons share evenly; this audit makes ``CHECKS`` of them.
    """
    confidence = 1 - false_alarms / checks
    sure = replace(found, confidence=confidence)
    _, members, false_positives, others = found.mu_errors
    fpr = rate_at_most(false_positives, others, 1 - (1 - confidence) / 2)
    known = certified.mu is not None and certified.is_gaussian
    noise = noise_detectable(certified.mu or 0.0, members, others, confidence) if known else None
    return Verdict(
        false_alarms=false_alarms,
        confidence=confidence,
        mu_alarm=sure.mu_audited,
        epsilon_alarm=sure.epsilon_audited,
        mu_certified=certified.mu_at(fpr),
        epsilon_certified=certified.epsilon,
        mu_refutable=mu_from_errors(0, members, 0, others, confidence),
        epsilon_refutable=epsilon_from_errors(0, members, 0, others, found.delta, confidence),
        mu_detectable=_mu_detectable(sure, certified, fpr) if noise is None else _over(certified.mu or 0.0, noise),
        noise_detectable=noise,
    )


def _over(mu: float, noise: float) -> float:
    return mu / noise if noise else math.inf


def _mu_detectable(sure: StepAudit, certified: Certificate, fpr: float) -> float:
    """The least mu through the attack's false positive rate whose misses stay few enough in 19 of 20 audits."""
    allowed = certified.least_false_negatives(fpr)
    _, members, false_positives, others = sure.mu_errors
    each = 1 - (1 - sure.confidence) / 2
    misses = np.arange(members)
    few = misses[betaincinv(misses + 1, members - misses, each) < allowed]
    if not len(few):
        return math.inf
    # The rate at which 19 of 20 audits miss so few.
    rate = betaincinv(few[-1] + 1, members - few[-1], 1 - _POWER)
    return float(ndtri(1 - max(false_positives, 1) / others) - ndtri(rate))


@lru_cache(maxsize=256)
def noise_detectable(mu: float, members: int, others: int, confidence: float) -> float:
    """The multiple of the charged noise below which 19 of 20 audits at their best refute ``mu``; 0 if none do.

    At their best: the attacker knows the law of a Gaussian release and its best threshold. Each of the two counts stays
    within what it exceeds once in 40 audits.
    """

    def refutes(true: float) -> bool:
        best = 0.0
        for cut in _CUTS * true:
            events = [
                int(binom.ppf(1 - (1 - _POWER) / 2, trials, rate))
                for trials, rate in ((members, ndtr(cut - true)), (others, ndtr(-cut)))
            ]
            best = max(best, mu_from_errors(events[0], members, events[1], others, confidence))
        return best > mu

    if not refutes(_MOST_EXCESS * mu):
        return 0.0
    low, high = 0.0, math.log(_MOST_EXCESS)
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if refutes(math.exp(middle) * mu) else (middle, high)
    return math.exp(-high)
