"""How much of its run a learned controller needs to be as good as the best baseline is at its end.

Tables 2 and 3 and section 4.2 of RLDP's paper (arXiv 2507.22565): lowest and final perplexity, steps, time and energy.
A baseline here is a mechanism whose knobs no agent moves, of the same model, accounting, budget and seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dptune.core.files import jsonable, write_json
from tasks.charts.seed_groups import SeedGroup
from tasks.metrics import JOULES, LOWEST, SAMPLE, SECONDS, SECONDS_TO_BEST, STEPS_SHARE
from tasks.mlflow import tracking

#: Perplexity of the same held-out records at every point of every curve. They are private: private telemetry has none.
METRIC = SAMPLE.name
NAME = STEPS_SHARE.name
STEPS_FILE = "steps.json"
_KINDS = ("seconds", "joules")
_SHARED = ("label", "model", "mechanism", "accounting", "budget_epsilon", "seed")
Result = dict[str, Any]


@dataclass(frozen=True)
class Used:
    """What a run had used when it was first as good as a target; fields are None where nothing says it.

    Attributes:
        seconds: time since its start. Of cells that trained side by side nobody knows each one's own.
        joules: energy of the machine, other work included.
    """

    seconds: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class StepsNeeded:
    """One run of an agent compared with the best baseline.

    Attributes:
        label: label of the agent's cell.
        baseline: the mechanism whose held-out perplexity is lowest at its end.
        target: that perplexity.
        share: share of the planned steps at the first evaluation that reaches ``target``; infinite if none does.
        used: what the agent's run had used by then.
        baseline_used: what the baseline's had at its end.
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
    used: Used = Used()
    baseline_used: Used = Used()


@dataclass(frozen=True)
class OverSeeds:
    """The runs of one agent at one budget.

    Attributes:
        runs: one a seed.
        reached: how many of them were ever as good.
        share: their mean; NaN if none was.
        used: means over those of them that say it; likewise ``baseline_used``.
    """

    runs: tuple[StepsNeeded, ...]
    reached: int
    share: float
    used: Used = Used()
    baseline_used: Used = Used()


@dataclass(frozen=True)
class CurveEnds:
    """Lowest and final held-out perplexity (sample) of one group of seeds: means over them."""

    group: SeedGroup
    lowest: float
    final: float


def steps_needed(results: Sequence[Result]) -> list[StepsNeeded]:
    """A row for every agent's run that has a baseline to be compared with and a curve of held-out records."""
    rows = []
    for result in results:
        rivals = [other for other in results if _comparable(result, other)]
        if result.get("agent") and _points(result) and rivals:
            best = min(rivals, key=_final)
            reached = next((point for point in _points(result) if float(point[METRIC]) <= _final(best)), None)
            rows.append(
                StepsNeeded(
                    **{key: result[key] for key in _SHARED},
                    baseline=best["mechanism"],
                    target=_final(best),
                    share=reached["releases"] / result["planned_releases"] if reached else math.inf,
                    used=_used(result, reached) if reached else Used(),
                    baseline_used=_used(best, _points(best)[-1]),
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
        there = [run for run in runs if math.isfinite(run.share)]
        share = statistics.fmean(run.share for run in there) if there else math.nan
        means = [_mean([getattr(run, name) for run in there]) for name in ("used", "baseline_used")]
        summaries.append(OverSeeds(tuple(runs), len(there), share, *means))
    return summaries


def curve_ends(groups: Sequence[SeedGroup]) -> list[CurveEnds]:
    """A row for each group whose seeds all have a curve of held-out records."""
    rows = []
    for group in groups:
        curves = [[float(point[METRIC]) for point in _points(result)] for result in group.results]
        if all(curves):
            final = statistics.fmean(curve[-1] for curve in curves)
            rows.append(CurveEnds(group, statistics.fmean(map(min, curves)), final))
    return rows


def lowest(result: Result) -> dict[str, Any]:
    """The metric ``LOWEST`` of a cell; empty where telemetry has no curve of held-out records."""
    curve = [float(point[METRIC]) for point in _points(result)]
    return jsonable({LOWEST.name: min(curve)}) if curve else {}


def with_steps(
    metrics: dict[str, dict[str, Any]], rows: Sequence[StepsNeeded], file: Path
) -> dict[str, dict[str, Any]]:
    """Write the rows to ``file``, and add each share and time to the metrics of its cell, named by its label."""
    write_json(file, [asdict(row) | jsonable({"target": row.target, "share": row.share}) for row in rows])
    found = {row.label: jsonable(_figures(row)) for row in rows}
    return {label: figures | found.get(label, {}) for label, figures in metrics.items()}


def publish_steps(rows: Sequence[StepsNeeded], runs: Mapping[str, Path], file: Path) -> None:
    """Send each share and time, and the file of all, to its cell's run in MLflow, if it has one.

    Args:
        runs: the files that hold the ids of runs, by the labels of their cells.
    """
    for row in rows:
        if runs[row.label].exists():
            tracking.add_to_run(runs[row.label].read_text().strip(), _figures(row), file)


def _comparable(result: Result, other: Result) -> bool:
    same = all(result[key] == other[key] for key in ("model", "accounting", "budget_epsilon", "seed", "unit"))
    baseline = not other.get("agent") and other["budget_epsilon"] is not None
    return same and baseline and bool(_points(other)) and math.isfinite(_final(other))


def _figures(row: StepsNeeded) -> dict[str, float]:
    seconds = row.used.seconds
    return {NAME: row.share} | ({} if seconds is None else {SECONDS_TO_BEST.name: seconds})


def _points(result: Result) -> list[dict[str, Any]]:
    return [point for point in result["history"] if METRIC in point]


def _final(result: Result) -> float:
    return float(_points(result)[-1][METRIC])


def _used(result: Result, point: Mapping[str, Any]) -> Used:
    alone = (result.get("together") or 1) == 1
    return Used(point.get(SECONDS.name), point.get(JOULES.name)) if alone else Used()


def _mean(used: Sequence[Used]) -> Used:
    seconds, joules = ([value for one in used if (value := getattr(one, name)) is not None] for name in _KINDS)
    return Used(statistics.fmean(seconds) if seconds else None, statistics.fmean(joules) if joules else None)
