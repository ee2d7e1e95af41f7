"""A bound on a run's true noise, from the coordinates of planted gradients that their coins left out.

A bound on epsilon from one run is too weak to see that half of the charged noise was added. This measures the noise:
a coordinate that a canary would have moved holds noise and the gradients of the records, and those only add to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.special import ndtri
from scipy.stats import chi2

from dptune.core.digits import at_least, at_most

_POWER = 0.95  # probability with which a fault must be seen to count as detectable
_ROUNDING = 1e-6  # relative error of float32, and of the grid that noisy values are rounded to


@dataclass(frozen=True)
class NoiseBound:
    """Bounds on the noise multiplier of one run, from its releases; 0 in ``detectable`` without power.

    Attributes:
        noise_multiplier: the least effective noise multiplier that the ledger is charged for.
        at_most: upper bound at the confidence that is reported; infinite without power.
        alarm: upper bound at the confidence of an alarm; below ``noise_multiplier`` it accuses the noise.
        detectable: the multiple of the charged noise below which 19 of 20 audits accuse, where records add as much to
            these coordinates as they add to this run's at most (at confidence 0.95).
        reason: reason why the audit has no power, in words; empty if it has.

    Example:
        >>> from dptune.audit.noise_test import NoiseBound
        >>> NoiseBound(noise_multiplier=1.0, at_most=0.46, alarm=0.51, detectable=0.92).accused
        True
    """

    noise_multiplier: float
    at_most: float
    alarm: float
    detectable: float
    reason: str = ""

    @property
    def accused(self) -> bool:
        """Whether the noise is less than the ledger is charged for."""
        return self.alarm < self.noise_multiplier * (1 - _ROUNDING)

    @property
    def power(self) -> str:
        """The noise that the audit could have detected, in words."""
        if self.reason:
            return f"NO POWER on the noise: {self.reason}"
        if not self.detectable:
            return "NO POWER on the noise: the gradients of the records in these coordinates would hide any lack of it"
        could = f"noise below {at_least(self.detectable)} times the charged {at_most(self.noise_multiplier)}"
        return f"could have refuted: {could}, beside what the records add here"

    def to_dict(self) -> dict[str, float | str]:
        """The result in plain JSON types, with the power in words."""
        return {**{name: value for name, value in asdict(self).items() if name != "reason"}, "power": self.power}


def audited_noise(
    squares: Sequence[float],
    moves: Sequence[float],
    absent: int,
    charged: float,
    confidence: float,
    alarm: float,
    *,
    gaussian: bool = True,
) -> NoiseBound:
    """Bound the noise multiplier of a run with Gaussian noise from above.

    Guarantee: if each release adds independent Gaussian noise of at least ``charged`` times the sensitivity, each bound
    is below ``charged`` with probability ``1 - confidence`` (or ``1 - alarm``) at most. Proof: a planted gradient moves
    its coordinate by the sensitivity at most, so that in units of a move the noise has a deviation of at least
    ``charged``. Given everything before, the sum of squares of a release is then at least noncentral chi-squared, which
    is stochastically larger than central, and so is the sum over releases. The bound is the better of two, from all
    releases together and from the one with the least squares; they share the failure probability.

    Args:
        squares: (releases,) of ``CraftedCanaries``, as is ``moves``.
        absent: number of canaries that their coins left out.
        gaussian: whether each release is charged as Gaussian noise.

    Returns: no power without an absent canary, for other noise, or where a move or a sum of squares is not known.

    Example:
        >>> from dptune.audit.noise_test import audited_noise
        >>> sound, half = [100.0] * 20, [25.0] * 20  # sums over 100 coordinates of noise 1 and of noise 0.5
        >>> audited_noise(sound, [1.0] * 20, absent=100, charged=1.0, confidence=0.95, alarm=0.999).accused
        False
        >>> audited_noise(half, [1.0] * 20, absent=100, charged=1.0, confidence=0.95, alarm=0.999).accused
        True
    """
    measured, steps = np.asarray(squares, dtype=np.float64), np.asarray(moves, dtype=np.float64)
    if not absent:
        return NoiseBound(charged, math.inf, math.inf, 0.0, "no canary was left out")
    if not gaussian:
        return NoiseBound(charged, math.inf, math.inf, 0.0, "this test is for Gaussian noise, and the run added other")
    if not len(steps) or len(measured) != len(steps) or not (np.isfinite(steps) & (steps > 0)).all():
        reason = "how much a planted gradient moves a release is not known for this mechanism"
        return NoiseBound(charged, math.inf, math.inf, 0.0, reason)
    if not np.isfinite(measured).all():  # files of earlier versions hold no squares
        reason = "the coordinates of canaries that are out were not measured in every release"
        return NoiseBound(charged, math.inf, math.inf, 0.0, reason)
    shares = measured / steps**2

    def bound(sure: float) -> float:
        failure = (1 - sure) / 2
        together = shares.sum() / chi2.ppf(failure, absent * len(shares))
        least = shares.min() / chi2.ppf(failure / len(shares), absent)
        return float(math.sqrt(min(together, least)))

    numbers = absent * len(shares)
    accused_below = chi2.ppf((1 - alarm) / 2, numbers)
    records = max(0.0, shares.sum() / charged**2 - chi2.ppf(1 - _POWER, numbers))
    return NoiseBound(charged, bound(confidence), bound(alarm), _detectable(numbers, records, accused_below))


def _detectable(numbers: int, records: float, accused_below: float) -> float:
    """The multiple f of the charged noise at which the sum of squares still is small enough in 19 of 20 runs.

    In units of the charged variance, that sum is f^2 X + 2 f sqrt(records) Z + records: X is chi-squared, Z standard
    normal. Each is taken at its own 95 % quantile.
    """
    if records >= accused_below:
        return 0.0
    square, line = chi2.ppf(_POWER, numbers), ndtri(_POWER) * math.sqrt(records)
    return float((math.sqrt(line**2 + square * (accused_below - records)) - line) / square)
