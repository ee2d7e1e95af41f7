"""Thresholds that cut scores into "in" and "out", chosen by pilot trials, and the errors of the other trials."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dptune.audit.bounds import epsilon_from_errors, mu_from_errors

_TAIL = 0.9
_CHOICE = 0.99  # confidence at which thresholds are compared on the pilot; no bound depends on it


@dataclass(frozen=True)
class Cuts:
    """The best thresholds for a bound on mu and for one on epsilon, and the bound on mu that the pilot itself gives."""

    for_mu: float
    for_epsilon: float
    promise: float


def best_cuts(
    inside: NDArray[np.float64], outside: NDArray[np.float64], trials: int, delta: float, confidence: float
) -> Cuts:
    """The thresholds that the pilot favours for ``trials`` trials in each world.

    For mu it is the threshold with the highest bound from the pilot's own few counts, so that none is chosen for luck
    in the tails; at a lower confidence, as ten trials show nothing at 0.999. For epsilon, which depends on the tails,
    it is the threshold whose bound would be highest if the trials err like the pilot's.
    """
    inside, outside = _numbers(inside, outside)
    scores = np.unique(np.quantile(np.concatenate([inside, outside]), np.linspace(0, 1, 201)))
    if len(scores) == 1:
        return Cuts(float(scores[0]), float(scores[0]), promise=0.0)  # no threshold tells equal scores apart
    cuts = (scores[1:] + scores[:-1]) / 2  # between scores: on one, rounding could break a tie
    promise, for_mu = max((mu_from_errors(*errors(inside, outside, cut), _CHOICE), float(cut)) for cut in cuts)
    shares = zip(cuts, _shares_above(-inside, -cuts), _shares_above(outside, cuts), strict=True)
    _, for_epsilon = max(
        (epsilon_from_errors(trials * missed, trials, trials * alarms, trials, delta, confidence), float(cut))
        for cut, missed, alarms in shares
    )
    return Cuts(for_mu, for_epsilon, promise)


def errors(inside: NDArray[np.float64], outside: NDArray[np.float64], cut: float) -> tuple[int, int, int, int]:
    """(missed, members, false alarms, others) when every score above ``cut`` is called "in", and nothing else is."""
    # ~(inside > cut), for NaN <= cut is false: a NaN would be called "in" in one world and "out" in the other.
    return int((~(inside > cut)).sum()), len(inside), int((outside > cut).sum()), len(outside)


def _numbers(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Replace NaN scores by one below all others: they are called "out" in both worlds, and no cut is NaN."""
    together = np.concatenate([inside, outside])
    finite = together[np.isfinite(together)]
    low, high = (finite.min() - 1, finite.max() + 1) if len(finite) else (0.0, 0.0)
    return tuple(np.nan_to_num(values, nan=low, neginf=low, posinf=high) for values in (inside, outside))


def _shares_above(values: NDArray[np.float64], cuts: NDArray[np.float64]) -> NDArray[np.float64]:
    """(cuts,) expected share of scores above each cut; where the pilot has few scores, from an exponential tail.

    A bound on epsilon depends on the rarest scores, of which the pilot has too few.
    """
    start = np.quantile(values, _TAIL)
    excess = (values[values > start] - start).mean() if (values > start).any() else 0.0
    above = (len(values) - np.searchsorted(np.sort(values), cuts, side="right")) / len(values)
    tail = (1 - _TAIL) * np.exp(-np.maximum(cuts - start, 0) / excess) if excess > 0 else 0.0
    return np.where(cuts <= start, above, tail)
