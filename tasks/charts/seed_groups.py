"""Cells that differ by their seed alone, taken together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks import metrics

Result = dict[str, Any]
#: Titles of the three epsilons that each cell has, by name.
EPSILONS = {one.name: one.title for one in metrics.EPSILONS if one.source == "releases"}
PUBLISHED, CERTIFIED = "epsilon_published", "epsilon_certified"
#: Budgets whose certified epsilons differ by less are the same epsilon: calibration leaves some of each.
SAME_EPSILON = 0.01
NO_BUDGET = "none"


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
