"""Seed groups: cells that differ only by their seed, taken together; and whether two groups differ.

Two groups are told apart over their seeds and, where runs keep it, over held-out records. Seeds say how much training
moves a figure; the records say how much it would move on others of the same kind. Both mechanisms are measured on the
same records, so the error is that of their difference, record group by record group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t, ttest_ind_from_stats

from tasks import metrics

Result = dict[str, Any]
#: Titles of the three epsilons that each cell has, by name.
EPSILONS = {one.name: one.title for one in metrics.EPSILONS if one.source == "releases"}
PUBLISHED, CERTIFIED = "epsilon_published", "epsilon_certified"
#: Budgets whose certified epsilons differ by less are the same epsilon: calibration leaves some of each.
SAME_EPSILON = 0.01
NO_BUDGET = "none"
_LEVEL = 0.05  # of the tests that tell groups apart


@dataclass(frozen=True)
class SeedGroup:
    """Cells that differ by their seed alone.

    Attributes:
        values: of the metric, one a seed.
        mean: their mean.
        spread: their sample standard deviation; 0 for one seed.
    """

    results: tuple[Result, ...]
    values: tuple[float, ...]
    mean: float
    spread: float

    @property
    def first(self) -> Result:
        """The first of the results: they share all that is no figure."""
        return self.results[0]

    @property
    def mechanism(self) -> str:
        """The mechanism's label."""
        return str(self.first["mechanism"])

    @property
    def certified(self) -> float:
        """The largest certified epsilon of a seed."""
        return max(float(result[CERTIFIED]) for result in self.results)

    @property
    def nonprivate(self) -> bool:
        """Whether it neither has nor claims any privacy, which is what others are measured against."""
        return all(math.isinf(float(self.first[key])) for key in (PUBLISHED, CERTIFIED))


def over_seeds(results: Sequence[Result], metric: str) -> list[SeedGroup]:
    """Group cells by everything but their seed, best mean first, and those that diverged last."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        key = (result["model"], result["mechanism"], result["accounting"], result["budget_epsilon"], result["unit"])
        groups.setdefault(key, []).append(result)
    summaries = []
    for members in groups.values():
        values = tuple(float(result["after"][metric]) for result in members)
        finite = all(map(math.isfinite, values))
        spread = (statistics.stdev(values) if finite else math.nan) if len(values) > 1 else 0.0
        summaries.append(SeedGroup(tuple(members), values, statistics.fmean(values), spread))
    return sorted(summaries, key=lambda group: group.mean if math.isfinite(group.mean) else math.inf)


def budget_of(result: Result) -> str:
    """The budget in words of a chart."""
    budget = result.get("budget_epsilon")
    return NO_BUDGET if budget is None else f"{budget:g}"


def cell_names(results: Sequence[Result]) -> dict[str, str]:
    """A name of each cell by its label, without what all cells share: ``rldp`` for ``small.rldp.eps2.seed0``."""
    shared = [len({one[key] for one in results} - {None}) < 2 for key in ("model", "budget_epsilon", "seed")]
    found = {}
    for one in results:
        budget = None if one["budget_epsilon"] is None else f"ε {one['budget_epsilon']:g}"
        texts = zip(shared, (one["model"], budget, f"seed {one['seed']}"), strict=True)
        model, at, seed = (None if same else text for same, text in texts)
        found[str(one["label"])] = " ".join(filter(None, (model, str(one["mechanism"]), at, seed)))
    return found if len(set(found.values())) == len(found) else {label: label for label in found}


def perplexity_metric(results: Sequence[Result]) -> str:
    """Held-out perplexity where telemetry allows it for every cell, else the public set's."""
    return metrics.ranked_by(results)[0].name


def distinct_epsilons(values: Sequence[float]) -> list[float]:
    """The finite epsilons in ascending order, each that is within a hundredth of the one before it left out."""
    found: list[float] = []
    for value in sorted(filter(math.isfinite, values)):
        if not found or value > found[-1] * (1 + SAME_EPSILON):
            found.append(value)
    return found


def untuned(results: Sequence[Result], model: str, metric: str) -> float | None:
    """The metric of the public model before fine-tuning; None if it was not measured."""
    found = [float(one["before"][metric]) for one in results if one["model"] == model and metric in one["before"]]
    return next(filter(math.isfinite, found), None)


def told_apart(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the values of several seeds show that two runs differ: Welch's t-test at 5 %, two-sided.

    Never with one seed.
    """
    if min(len(one), len(other)) < 2:
        return False
    samples = [(statistics.fmean(values), statistics.stdev(values), len(values)) for values in (one, other)]
    if samples[0][1] == samples[1][1] == 0:
        return samples[0][0] != samples[1][0]
    return bool(ttest_ind_from_stats(*samples[0], *samples[1], equal_var=False).pvalue < _LEVEL)


def differ(one: SeedGroup, other: SeedGroup, metric: str) -> bool:
    """Whether seeds tell two mechanisms apart, and held-out records do too where the runs keep their losses."""
    error = record_error(one, other, metric)
    return told_apart(one.values, other.values) and (error is None or error.differs)


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
        return abs(self.difference) > float(t.ppf(1 - _LEVEL / 2, self.groups - 1)) * self.error


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
