"""How many of its steps a learned controller needs to be as good as the best baseline is at its end.

Table 3 of RLDP's paper (arXiv 2507.22565). A baseline here is a mechanism whose knobs no agent moves, of the same
model, accounting, budget and seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dptune.core.files import jsonable, write_json
from tasks.metrics import SAMPLE, STEPS_SHARE
from tasks.mlflow import tracking

#: Perplexity of the same held-out records at every point of every curve. They are private: private telemetry has none.
METRIC = SAMPLE.name
NAME = STEPS_SHARE.name
STEPS_FILE = "steps.json"
_SHARED = ("label", "model", "mechanism", "accounting", "budget_epsilon", "seed")
Result = dict[str, Any]


@dataclass(frozen=True)
class StepsNeeded:
    """One run of an agent compared with the best baseline.

    Attributes:
        label: label of the agent's cell.
        baseline: the mechanism whose held-out perplexity is lowest at its end.
        target: that perplexity.
        share: share of the planned steps at the first evaluation that reaches ``target``; infinite if none does.
    """

    label: str
    model: str
    mechanism: str
    accounting: str
    budget_epsilon: float
    seed: int
    baseline: str
    target: float
    share: float


@dataclass(frozen=True)
class OverSeeds:
    """The runs of one agent at one budget.

    Attributes:
        runs: one a seed.
        reached: how many of them were ever as good.
        share: their mean; NaN if none was.
    """

    runs: tuple[StepsNeeded, ...]
    reached: int
    share: float


def steps_needed(results: Sequence[Result]) -> list[StepsNeeded]:
    """A row for every agent's run that has a baseline to be compared with and a curve of held-out records."""
    rows = []
    for result in results:
        rivals = [other for other in results if _comparable(result, other)]
        if result.get("agent") and _curve(result) and rivals:
            best = min(rivals, key=_final)
            rows.append(
                StepsNeeded(
                    **{key: result[key] for key in _SHARED},
                    baseline=best["mechanism"],
                    target=_final(best),
                    share=_share(result, _final(best)),
                )
            )
    return rows


def steps_over_seeds(rows: Sequence[StepsNeeded]) -> list[OverSeeds]:
    """Rows that differ by their seed alone, together."""
    groups: dict[tuple[Any, ...], list[StepsNeeded]] = {}
    for row in rows:
        groups.setdefault((row.model, row.mechanism, row.accounting, row.budget_epsilon), []).append(row)
    summaries = []
    for runs in groups.values():
        shares = [run.share for run in runs if math.isfinite(run.share)]
        summaries.append(OverSeeds(tuple(runs), len(shares), statistics.fmean(shares) if shares else math.nan))
    return summaries


def with_steps(
    metrics: dict[str, dict[str, Any]], rows: Sequence[StepsNeeded], file: Path
) -> dict[str, dict[str, Any]]:
    """Write the rows to ``file``, and add each share to the metrics of its cell, which are named by its label."""
    write_json(file, [asdict(row) | jsonable({"target": row.target, "share": row.share}) for row in rows])
    shares = {row.label: jsonable({NAME: row.share}) for row in rows}
    return {label: figures | shares.get(label, {}) for label, figures in metrics.items()}


def publish_steps(rows: Sequence[StepsNeeded], runs: Mapping[str, Path], file: Path) -> None:
    """Send each share, and the file of all, to its cell's run in MLflow, if it has one.

    Args:
        runs: the files that hold the ids of runs, by the labels of their cells.
    """
    for row in rows:
        if runs[row.label].exists():
            tracking.add_to_run(runs[row.label].read_text().strip(), {NAME: row.share}, file)


def _comparable(result: Result, other: Result) -> bool:
    same = all(result[key] == other[key] for key in ("model", "accounting", "budget_epsilon", "seed", "unit"))
    baseline = not other.get("agent") and other["budget_epsilon"] is not None
    return same and baseline and bool(_curve(other)) and math.isfinite(_final(other))


def _curve(result: Result) -> list[tuple[int, float]]:
    return [(point["releases"], float(point[METRIC])) for point in result["history"] if METRIC in point]


def _final(result: Result) -> float:
    return _curve(result)[-1][1]


def _share(result: Result, target: float) -> float:
    reached = [releases for releases, perplexity in _curve(result) if perplexity <= target]
    return reached[0] / result["planned_releases"] if reached else math.inf
