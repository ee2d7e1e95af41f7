"""The table of scores: a classifier's accuracy, or metrics of what models write, by mechanism and budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from dptune.core.metric import Metric
from tasks.charts.seed_groups import Result, SeedGroup
from tasks.metrics import shown_in

_CONSTANT = "eval_largest_class"


@dataclass(frozen=True)
class ScoreRow:
    """A mechanism at one budget: each score's mean over seeds, and its sample standard deviation (None of one seed)."""

    group: SeedGroup
    values: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class ScoreTable:
    """Rows, and what is said of the scores.

    Attributes:
        names: the columns.
        explained: what each column is, for those that need a word; by name.
        notes: sentences on implementations, and on what needs no training.
    """

    names: tuple[str, ...]
    explained: Mapping[str, str]
    rows: tuple[ScoreRow, ...]
    notes: tuple[str, ...]


def score_table(groups: Sequence[SeedGroup]) -> ScoreTable | None:
    """The scores that all cells have; None without any."""
    results = [result for group in groups for result in group.results]
    found = [scores_of(result) for result in results]
    names = tuple(name for name in (found[0] if found else {}) if all(name in one for one in found))
    if not names:
        return None
    rows = tuple(ScoreRow(group, tuple(_over_seeds(group.results, name) for name in names)) for group in groups)
    explained = {one.title: _explained(one) for one in shown_in("scores") if one.title in names}
    return ScoreTable(names, explained, rows, tuple(_notes(results[0])))


def _explained(metric: Metric) -> str:
    better = f"{metric.better} is better" if metric.better else ""
    return "; ".join(filter(None, (metric.explanation, better)))


def scores_of(result: Result) -> dict[str, float]:
    """The scores of a cell by the names of the page."""
    of_labels = {
        one.title: float(result["after"][one.name]) for one in shown_in("scores") if one.name in result["after"]
    }
    written: Mapping[str, Any] = result.get("scores", {})
    return of_labels | {name: float(value) for name, value in written.items()}


def _over_seeds(results: Sequence[Result], name: str) -> tuple[float, float | None]:
    values = [scores_of(result)[name] for result in results]
    return fmean(values), stdev(values) if len(values) > 1 else None


def _notes(result: Result) -> list[str]:
    notes = [f"{name}: {signature}." for name, signature in result.get("signatures", {}).items()]
    if "decoding" in result:
        notes.append(f"{result['inputs']} inputs; decoding: {result['decoding']}.")
    if _CONSTANT in result["after"]:
        share = float(result["after"][_CONSTANT])
        notes.append(
            f"A constant answer has an accuracy of {share:.4f}. Perplexity here is exp of the labels' mean loss."
        )
    return notes
