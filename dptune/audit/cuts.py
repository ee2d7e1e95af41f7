"""Where to cut scores into "in" and "out", chosen by pilot trials, and what the others then count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptune.audit.bounds import epsilon_from_errors, mu_from_errors

_TAIL = 0.9
_CHOICE = 0.8  # confidence at which pilots are compared; it decides no bound


@dataclass(frozen=True)
class Cuts:
    """The best thresholds for a bound on mu and for one on epsilon, and the bound on mu that the pilot itself gives."""

    for_mu: float
    for_epsilon: float
    promise: float


def best_cuts(
    inside: NDArray[np.float64], outside: NDArray[np.float64], counted: int, delta: float, confidence: float
) -> Cuts:
    """The thresholds that the pilot favours for ``counted`` trials in each world.

    For mu: whose bound is highest from the pilot's own counts, which are few, so that none is chosen for its luck in
    the tails; at a confidence of its own, as ten trials show nothing at 0.999. For epsilon, which the tails decide:
    whose bound would be highest if the trials err like the pilot's.
    """
    inside, outside = _numbers(inside, outside)
    scores = np.unique(np.quantile(np.concatenate([inside, outside]), np.linspace(0, 1, 201)))
    if len(scores) == 1:
        return Cuts(float(scores[0]), float(scores[0]), promise=0.0)  # it tells nothing
    cuts = (scores[1:] + scores[:-1]) / 2  # between scores, so that none ties with one
    promise, for_mu = max((mu_from_errors(*errors(inside, outside, cut), _CHOICE), float(cut)) for cut in cuts)
    shares = zip(cuts, _shares_above(-inside, -cuts), _shares_above(outside, cuts), strict=True)
    _, for_epsilon = max(
        (epsilon_from_errors(counted * missed, counted, counted * alarms, counted, delta, confidence), float(cut))
        for cut, missed, alarms in shares
    )
    return Cuts(for_mu, for_epsilon, promise)


def errors(inside: NDArray[np.float64], outside: NDArray[np.float64], cut: float) -> tuple[int, int, int, int]:
    """(missed, members, false alarms, others) when every score above ``cut`` is called "in", and nothing else is."""
    # Not "inside <= cut": a score that is no number must be called the same in both worlds.
    return int((~(inside > cut)).sum()), len(inside), int((outside > cut).sum()), len(outside)


def _numbers(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Scores that are no numbers are called "out" in both worlds: put below all others, so that cuts are numbers."""
    together = np.concatenate([inside, outside])
    finite = together[np.isfinite(together)]
    low, high = (finite.min() - 1, finite.max() + 1) if len(finite) else (0.0, 0.0)
    return tuple(np.nan_to_num(values, nan=low, neginf=low, posinf=high) for values in (inside, outside))


def _shares_above(values: NDArray[np.float64], cuts: NDArray[np.float64]) -> NDArray[np.float64]:
    """(cuts,) the share of scores to expect above each; where few were seen, as if their tail were exponential.

    The pilot sees too few of the rarest scores, and these decide a bound on epsilon.
    """
    start = np.quantile(values, _TAIL)
    excess = (values[values > start] - start).mean() if (values > start).any() else 0.0
    above = (len(values) - np.searchsorted(np.sort(values), cuts, side="right")) / len(values)
    tail = (1 - _TAIL) * np.exp(-np.maximum(cuts - start, 0) / excess) if excess > 0 else 0.0
    return np.where(cuts <= start, above, tail)
