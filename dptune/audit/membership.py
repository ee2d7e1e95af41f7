"""Success of scores in telling members from non-members. Scores and labels are private; larger means "member"."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from dptune.errors import DataError

FALSE_POSITIVE_RATES = (1e-2, 1e-3)


@dataclass(frozen=True)
class Roc:
    """The ROC curve of an attack, from the strictest threshold to the loosest. Private.

    Attributes:
        false_positive_rate: share of non-members above each threshold, rising from 0 to 1.
        true_positive_rate: share of members above it.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.membership import roc
        >>> curve = roc(np.array([2.0, 3.0]), np.array([1.0, 2.5]))
        >>> curve.false_positive_rate.tolist(), curve.true_positive_rate.tolist()
        ([0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0])
    """

    false_positive_rate: NDArray[np.float64] = field(repr=False)
    true_positive_rate: NDArray[np.float64] = field(repr=False)


def auc(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """Probability that a member scores above a non-member, ties counting one half; 0.5 is no information.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.membership import auc
        >>> auc(members=np.array([2.0, 3.0]), others=np.array([1.0, 2.5]))
        0.75
    """
    _check(members, others)
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.mean() - (len(members) + 1) / 2) / len(others))


def roc(members: NDArray[np.float64], others: NDArray[np.float64]) -> Roc:
    """The ROC curve at every threshold that the scores distinguish.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.membership import roc
        >>> roc(np.array([2.0, 3.0]), np.array([1.0, 2.5])).true_positive_rate.tolist()
        [0.0, 0.5, 0.5, 1.0, 1.0]
    """
    _check(members, others)
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    # Rates are computed from counts: 1 - 99/100 would exceed 0.01 in floating point.
    above = [
        (len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")) / len(scores)
        for scores in (members, others)
    ]
    true, false = (np.concatenate([[0.0], rates]) for rates in above)
    return Roc(false, true)


def true_positive_rate(curve: Roc, false_positive_rate: float) -> float:
    """The best true positive rate at a false positive rate of at most this.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.membership import roc, true_positive_rate
        >>> true_positive_rate(roc(np.array([2.0, 3.0]), np.array([1.0, 2.5])), false_positive_rate=0.1)
        0.5
    """
    return float(curve.true_positive_rate[curve.false_positive_rate <= false_positive_rate].max())


def true_positive_rate_by_chance(false_positive_rate: float, others: int) -> float:
    """The mean true positive rate of random scores without ties.

    A member scores above the (k + 1)-th highest of n non-members with probability (k + 1) / (n + 1), k being the number
    of false alarms that the rate allows. This exceeds the rate, because the threshold is chosen by the scores.

    Example:
        >>> from dptune.audit.membership import true_positive_rate_by_chance
        >>> round(true_positive_rate_by_chance(0.01, others=1000), 4)
        0.011
    """
    return (_allowed(false_positive_rate, others) + 1) / (others + 1)


def _allowed(false_positive_rate: float, others: int) -> int:
    """Number of false alarms that the rate allows, safe from rounding: 0.29 * 100 is below 29 in floating point."""
    return math.floor(false_positive_rate * others * (1 + 1e-12))


def membership_report(members: NDArray[np.float64], others: NDArray[np.float64]) -> dict[str, float]:
    """AUC and true positive rates, with those of random guesses, and the numbers of members and non-members.

    A false positive rate below 1 / non-members is left out: so few non-members cannot tell it from 0.

    Example:
        >>> import numpy as np
        >>> from dptune.audit.membership import membership_report
        >>> membership_report(np.array([2.0, 3.0]), np.array([1.0, 2.5]))
        {'auc': 0.75, 'auc_chance': 0.5, 'auc_chance_deviation': 0.3227486121839514, 'members': 2, 'non_members': 2}
    """
    curve = roc(members, others)
    resolved = [rate for rate in FALSE_POSITIVE_RATES if _allowed(rate, len(others))]
    rates = {f"tpr_at_fpr_{rate:g}": true_positive_rate(curve, rate) for rate in resolved}
    chance = {f"tpr_at_fpr_{rate:g}_chance": true_positive_rate_by_chance(rate, len(others)) for rate in resolved}
    # Standard deviation of the AUC of random scores (Mann and Whitney 1947).
    spread = ((len(members) + len(others) + 1) / (12 * len(members) * len(others))) ** 0.5
    return {
        "auc": auc(members, others),
        "auc_chance": 0.5,
        "auc_chance_deviation": spread,
        **rates,
        **chance,
        "members": len(members),
        "non_members": len(others),
    }


def _check(members: NDArray[np.float64], others: NDArray[np.float64]) -> None:
    if len(members) == 0 or len(others) == 0:
        problem = f"{len(members)} members and {len(others)} non-members cannot be told apart"
        raise DataError(problem, fix="plant more audit canaries, or score more records", file="membership attack")
    if not (np.isfinite(members).all() and np.isfinite(others).all()):
        raise DataError("a score is not finite", fix="check the model's losses", file="membership attack")
