"""Certificate of an audited step, the part of it that an attack could refute, and the accusation if one does.

An attack's false positive and false negative rates are a point; the certificate is a curve that no such point may lie
below. Each rate has an upper confidence bound, and the curve falls, so a pair of bounds below it refutes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from dptune.audit.epsilon_bounds import epsilon_from_errors, mu_from_errors, rate_at_most
from dptune.audit.games.scene import StepAudit
from dptune.core.digits import at_least, at_most, shown_above
from dptune.core.errors import ConfigError
from dptune.privacy.accountants import epsilons
from dptune.privacy.accounting.parts import disjoint
from dptune.privacy.release import Composition

#: Probability with which an attack must succeed for a fault to count as detectable.
_POWER = 0.95
#: Deltas at which a certified trade-off function is bounded, where it is no Gaussian one.
DELTAS = (1e-10, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4)
_MOST_EXCESS = 1e3
_LARGEST_EPSILON = 700.0
_CUTS = np.linspace(0.05, 0.95, 37)
CHECKS = 2  # number of comparisons that an audit makes: on mu and on epsilon


#: How an accusation ends where an accountant certified what an attack refutes.
CERTIFIED_WRONG = "certified: the mechanism or its accountant is wrong"


@dataclass(frozen=True)
class Certificate:
    """The trade-off function that is certified for some releases.

    Attributes:
        epsilon: certified epsilon at the audit's delta; infinite if nothing is certified.
        mu: certified mu of Gaussian DP; None if the function is no Gaussian one, or nothing is certified.
        pairs: certified (epsilon, delta) pairs, which bound the function if it is not Gaussian.
        is_gaussian: whether an attack can reach ``mu``; for a Laplace mixture ``mu`` is only a bound.

    Example:
        >>> from collections import Counter
        >>> from dptune.audit.verdict import certificate
        >>> from dptune.privacy.release import Release
        >>> certificate(Counter({Release(sample_rate=1.0, noise_multiplier=2.0): 4}), delta=1e-5).mu
        1.0
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
            if epsilon < _LARGEST_EPSILON  # beyond, exp overflows, and the bound is nearly 0
        )
        return max([0.0, *bounds])

    def mu_at(self, false_positives: float) -> float:
        """``mu``, or the mu of the Gaussian trade-off function that meets the certified one at this rate; infinite if
        nothing is certified.
        """
        if self.mu is not None:
            return self.mu
        allowed = self.least_false_negatives(false_positives)
        return float(ndtri(1 - false_positives) - ndtri(allowed)) if allowed > 0 else math.inf


def certificate(composition: Composition, delta: float) -> Certificate:
    """Make the certificate of releases about one unit; if they are about disjoint parts, that of the dearest part.

    Gaussian releases that take every unit are Gaussian DP exactly: mu^2 is the sum of (sensitivity / noise)^2. Others
    have no single mu: the epsilons that the accountant certifies at several deltas bound their trade-off function.

    Example:
        >>> from collections import Counter
        >>> from dptune.audit.verdict import certificate
        >>> from dptune.privacy.release import Release
        >>> certified = certificate(Counter({Release(sample_rate=1.0, noise_multiplier=1.0): 1}), delta=1e-5)
        >>> round(certified.least_false_negatives(0.05), 3)
        0.74
    """
    moves = any(release.adaptive for release in composition) and sum(composition.values()) > 1
    if moves or any(release.leaks for release in composition):
        return Certificate(math.inf, None)
    # Marked adaptive, a release would need a filter; but its noise is fixed before its step.
    fixed = Counter({replace(release, adaptive=False): count for release, count in composition.items()})
    epsilon = epsilons(fixed, delta).certified
    if all(release.sample_rate == 1.0 for release in fixed):
        is_gaussian = all(release.noise == "gaussian" for release in fixed)
        return Certificate(epsilon, max(_mu(part) for part in disjoint(fixed)), is_gaussian=is_gaussian)
    return Certificate(epsilon, None, certified_pairs(lambda one: epsilons(fixed, one).certified, DELTAS))


def certified_pairs(price: Callable[[float], float], deltas: Iterable[float]) -> tuple[tuple[float, float], ...]:
    """The (epsilon, delta) that are certified; no pair at a delta where nothing is.

    Truncated Poisson sampling has no price at a delta that its cuts alone take.
    """
    found = []
    for delta in deltas:
        try:
            epsilon = price(delta)
        except ConfigError:
            continue
        if math.isfinite(epsilon):
            found.append((epsilon, delta))
    return tuple(found)


def _mu(composition: Composition) -> float:
    return math.sqrt(sum(count / one.gaussian_multiplier**2 for one, count in composition.items()))


@dataclass(frozen=True)
class Verdict:
    """The comparison of an audit with a certificate.

    Attributes:
        false_alarms: probability of an accusation if the certificate is true, over all checks that share it.
        confidence: confidence of each check by itself.
        mu_alarm, epsilon_alarm: lower bounds at that confidence.
        mu_certified, epsilon_certified: certified values, which the bounds must not exceed; infinite if there are none.
        mu_refutable, epsilon_refutable: the largest values that these trials could refute, with no error in any trial.
        mu_detectable: true mu from which on 19 of 20 audits refute the certificate: by the best attack if the
            certificate is Gaussian, else at this attack's false positive rate; infinite if there is none.
        noise_detectable: the same for a Gaussian certificate, as a multiple of the charged noise below which audits
            refute it; 0 if there is none; None without a single mu.
        fault: what the audit saw to break a precondition of the price, without any chance of error; None if nothing.
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
    fault: str | None = None

    @property
    def accusation(self) -> str | None:
        """The accusation in one sentence: what the attack shows above the certificate, and a fault; None without."""
        found = []
        for name in ("mu", "epsilon"):
            shown, certified = getattr(self, f"{name}_alarm"), getattr(self, f"{name}_certified")
            if shown > certified:
                lower, upper = shown_above(shown, certified, 4)
                shows = f"the attack shows {name} >= {lower} at confidence {at_least(self.confidence, 6)}"
                found.append(f"{shows}, but {upper} is {CERTIFIED_WRONG}")
                break
        return "; ".join([*found, *filter(None, [self.fault])]) or None

    @property
    def power(self) -> str:
        """The excess over the certificate that the audit could have detected, in words."""
        if math.isinf(self.epsilon_certified) and math.isinf(self.mu_certified):
            return "nothing finite is certified, so there is nothing to refute"
        return f"{self._power_on_mu}; {self._power_on_epsilon}"

    @property
    def _power_on_mu(self) -> str:
        if math.isinf(self.mu_detectable):
            most = at_most(self.mu_refutable)
            return f"NO POWER on mu: these trials show at most {most}, with no error in any of them"
        sees = f"a mu of {at_most(self.mu_detectable)} or more is refuted in 19 of 20 audits"
        if self.noise_detectable is None:
            return sees
        return f"{sees} at best: noise below {at_least(self.noise_detectable)} times what is charged"

    @property
    def _power_on_epsilon(self) -> str:
        if self.epsilon_refutable <= self.epsilon_certified:
            return f"NO POWER on epsilon: these trials refute at most {at_most(self.epsilon_refutable)}"
        return f"a certified epsilon below {at_least(self.epsilon_refutable)} can be refuted"

    def to_dict(self) -> dict[str, float | str | None]:
        """All fields, and the power in words."""
        figures = asdict(self)
        alarms = {"false_alarms": figures.pop("false_alarms"), "alarm_confidence": figures.pop("confidence")}
        if figures["fault"] is None:
            del figures["fault"]
        return {**alarms, **figures, "power": self.power}


def judged(audit: StepAudit, certificate: Certificate, false_alarms: float, checks: int = CHECKS) -> Verdict:
    """Compare an audit with a certificate.

    Guarantee: if the certificate is true, any of this audit's checks accuses with probability ``false_alarms * CHECKS /
    checks`` at most, over the audit's coins and noise.

    Args:
        false_alarms: probability that ``checks`` comparisons share evenly; this audit makes ``CHECKS`` of them.
    """
    confidence = 1 - false_alarms / checks
    sure = replace(audit, confidence=confidence)
    _, members, false_positives, others = audit.mu_errors
    fpr = rate_at_most(false_positives, others, 1 - (1 - confidence) / 2)
    known = certificate.mu is not None and certificate.is_gaussian
    noise = noise_detectable(certificate.mu or 0.0, members, others, confidence) if known else None
    return Verdict(
        false_alarms=false_alarms,
        confidence=confidence,
        mu_alarm=sure.mu_audited,
        epsilon_alarm=sure.epsilon_audited,
        mu_certified=certificate.mu_at(fpr),
        epsilon_certified=certificate.epsilon,
        mu_refutable=mu_from_errors(0, members, 0, others, confidence),
        epsilon_refutable=epsilon_from_errors(0, members, 0, others, audit.delta, confidence),
        mu_detectable=_mu_detectable(sure, certificate, fpr) if noise is None else _over(certificate.mu or 0.0, noise),
        noise_detectable=noise,
        fault=audit.fault,
    )


def _over(mu: float, noise: float) -> float:
    return mu / noise if noise else math.inf


def _mu_detectable(sure: StepAudit, certified: Certificate, fpr: float) -> float:
    """The least mu that, at the attack's false positive rate, has few enough misses in 19 of 20 audits."""
    allowed = certified.least_false_negatives(fpr)
    _, members, false_positives, others = sure.mu_errors
    each = 1 - (1 - sure.confidence) / 2
    misses = np.arange(members)
    few = misses[betaincinv(misses + 1, members - misses, each) < allowed]
    if not len(few):
        return math.inf
    # The miss rate at which 19 of 20 audits have no more misses than that.
    rate = betaincinv(few[-1] + 1, members - few[-1], 1 - _POWER)
    return float(ndtri(1 - max(false_positives, 1) / others) - ndtri(rate))


@lru_cache(maxsize=256)
def noise_detectable(mu: float, members: int, others: int, confidence: float) -> float:
    """The multiple of the charged noise below which the best attack refutes ``mu`` in 19 of 20 audits; 0 if it cannot.

    The best attacker knows the law of a Gaussian release and the best threshold. Each of the two error counts is taken
    at the value that it exceeds once in 40 audits.
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
