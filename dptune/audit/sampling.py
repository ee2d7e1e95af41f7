"""How often planted gradients entered the batches of a run, as its releases show it: a witness of the draw itself.

A bound on epsilon from one run is too weak to see that a draw takes units at twice their rate. The rate is seen
directly: a canary in the data is one out of the data plus, at each step, a known move with the rate's probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import mannwhitneyu

from dptune.privacy.entropy import Entropy, uniform

_POWER = 0.95  # how often an attack must succeed to be said to see something
_HALVINGS = 14
_MANY = 20  # from here on rank sums are nearly normal


@dataclass(frozen=True)
class Unseen:
    """An audit of the draw that has no power, and why.

    Attributes:
        sample_rate: that the ledger is charged for.
    """

    sample_rate: float
    reason: str

    @property
    def power(self) -> str:
        """What the audit could have seen, in words: nothing."""
        return f"NO POWER on the draw: {self.reason}"

    def to_dict(self) -> dict[str, float | str]:
        """Plain JSON types."""
        return {"sample_rate": self.sample_rate, "power": self.power}


@dataclass(frozen=True)
class SampleRate:
    """What the releases of one run show of its draw.

    Attributes:
        sample_rate: that the ledger is charged for.
        estimate: how often a canary in the data entered a batch.
        audited: lower bound at the confidence that is reported.
        alarm: lower bound at the confidence of an alarm; above ``sample_rate`` it accuses the draw.
        refutable: a true rate from here on is found out in about 19 of 20 audits; more than 1 if none is.
    """

    sample_rate: float
    estimate: float
    audited: float
    alarm: float
    refutable: float

    def to_dict(self) -> dict[str, float | str]:
        """Plain JSON types, and the power in words."""
        return {**asdict(self), "power": self.power}

    @property
    def power(self) -> str:
        """What the audit could have seen, in words."""
        if self.refutable > 1:
            return "NO POWER on the draw: canaries in every batch would look like these"
        return (
            f"could have refuted: a draw at a rate above {self.refutable:.3g}, where {self.sample_rate:.3g} is charged"
        )


def audited_sample_rate(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    moves: Sequence[float],
    sample_rate: float,
    confidence: float,
    alarm: float,
    entropy: Entropy,
) -> SampleRate | Unseen:
    """Bound the rate of a draw from below.

    Guarantee: if at each step a canary that is in the data enters the batch with probability r of its own, and what
    else lies in its coordinate does not depend on its coin, each bound exceeds r with probability ``1 - confidence``
    (or ``1 - alarm``) at most. Canaries that are not in the data are given entries at rate r by simulation; then coins
    and scores have nothing to do with each other, and the rank sum of those in the data has the law of Mann and
    Whitney 1947, whatever the noise is.

    Args:
        scores: (canaries,) of ``CraftedCanaries``, as are ``included`` and ``moves``.
        sample_rate: that was charged.

    Returns: ``Unseen`` without a canary on either side, or where a move is not known.
    """
    steps = np.asarray(moves, dtype=np.float64)
    if included.all() or not included.any():
        return Unseen(sample_rate, "the coins of all planted gradients fell alike")
    if not len(steps) or not (steps > 0).all():
        return Unseen(
            sample_rate,
            "how much a planted gradient moves a release is not known where the mechanism clips in other coordinates, "
            "or by the batch itself",
        )
    inside, outside = scores[included], scores[~included]
    coins = uniform(entropy, len(outside) * len(steps)).reshape(len(outside), len(steps))
    ties = uniform(entropy, len(scores))

    def p_value(rate: float) -> float:
        simulated = outside + np.where(coins < rate, steps, 0.0).sum(axis=1)
        return _rank_p_value(inside, simulated, ties)

    shift = float(inside.mean() - outside.mean())
    spread = float(np.sqrt(inside.var() / len(inside) + inside.var() / len(outside)))
    sees = float((ndtri(alarm) + ndtri(_POWER)) * spread / steps.sum())
    return SampleRate(
        sample_rate=sample_rate,
        estimate=shift / float(steps.sum()),
        audited=_largest_refuted(p_value, 1 - confidence),
        alarm=_largest_refuted(p_value, 1 - alarm),
        refutable=sample_rate + sees,
    )


def _rank_p_value(inside: NDArray[np.float64], outside: NDArray[np.float64], ties: NDArray[np.float64]) -> float:
    """Chance that those in the data rank so high if nothing tells them from the others; ties are broken by ``ties``."""
    order = np.lexsort((ties, np.concatenate([inside, outside])))
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order))
    ranked, others = ranks[: len(inside)], ranks[len(inside) :]
    if min(len(ranked), len(others)) < _MANY:
        return float(mannwhitneyu(ranked, others, alternative="greater", method="exact").pvalue)
    # The normal law with the correction for continuity; the exact tail is lighter.
    pairs = len(ranked) * len(others)
    above = ranked.sum() - len(ranked) * (len(ranked) - 1) / 2
    return float(ndtr(-(above - pairs / 2 - 0.5) / np.sqrt(pairs * (len(ranks) + 1) / 12)))


def _largest_refuted(p_value: Callable[[float], float], level: float) -> float:
    """The end of the rates from 0 on whose p-value is below ``level``, from below; 0 if none is."""
    if p_value(0.0) >= level:
        return 0.0
    low, high = 0.0, 1.0
    if p_value(high) < level:
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < level else (low, middle)
    return low
