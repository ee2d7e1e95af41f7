"""Difference of two mechanisms on the held-out records, with its standard error over those records.

Seeds say how much training moves a figure; the records say how much it would move on others of the same kind. Both
mechanisms are measured on the same records, so the error is that of their difference, record group by record group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from tasks.charts.seed_groups import SeedGroup


@dataclass(frozen=True)
class RecordError:
    """How much higher one perplexity is than another, on these records.

    Attributes:
        difference: of the two means over seeds, each a geometric mean.
        error: standard error of ``difference`` over records, for these trained models.
        groups: number of groups of records that it was estimated from.
    """

    difference: float
    error: float
    groups: int

    @property
    def differs(self) -> bool:
        """Whether the records show a difference: Student's t at 5 %, two-sided."""
        return abs(self.difference) > float(t.ppf(0.975, self.groups - 1)) * self.error


def record_error(one: SeedGroup, other: SeedGroup, metric: str) -> RecordError | None:
    """How much higher ``other`` is than ``one``, by the delete-a-group jackknife (Kott 2001) over groups of records.

    Returns: None where a run keeps no losses of groups, or the two were not measured on the same records.

    Args:
        metric: the perplexity that the groups are about.
    """
    runs = [[_groups(result, metric) for result in group.results] for group in (one, other)]
    counts = runs[0][0][:, 1]
    if not len(counts) or any(not np.array_equal(run[:, 1], counts) for runs_of_one in runs for run in runs_of_one):
        return None
    low, high = (np.mean([run[:, 0] for run in runs_of_one], axis=0) for runs_of_one in runs)
    level, gaps = math.exp(low.sum() / counts.sum()), high - low
    gap, size = float(gaps.sum() / counts.sum()), len(counts)
    without = (gaps.sum() - gaps) / (counts.sum() - counts)
    error = math.sqrt((size - 1) / size * float(((without - without.mean()) ** 2).sum()))
    return RecordError(level * math.expm1(gap), level * math.exp(gap) * error, size)


def _groups(result: dict[str, object], metric: str) -> NDArray[np.float64]:
    """(groups, 2) total losses and numbers of tokens of a run's records; (0, 2) without any."""
    kept = result.get("loss_groups") or {}
    assert isinstance(kept, dict)
    return np.array(kept.get(metric, []), dtype=np.float64).reshape(-1, 2)
