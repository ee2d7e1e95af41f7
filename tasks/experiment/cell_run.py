"""A cell's run in MLflow: the few figures that runs are compared by. All others go to a table among its files."""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dptune.core.files import PRIVATE_FILE, jsonable, replacing
from tasks.metrics import allowed, shown_in
from tasks.mlflow.tracking import ChildRun

_STEPS, _TABLE = "steps.jsonl", "steps.csv"
_RADIUS = "radius_"


def main_names() -> list[str]:
    """Names of the figures of a cell that MLflow shows."""
    return [metric.name for metric in shown_in("tracking")]


def main_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the figures that MLflow shows (DPTUNE_MLFLOW_METRICS=all: every one).

    Radii become their mean; infinities are left out, for no chart shows any.
    Whether an epsilon is infinite is said by the run's tags.
    """
    if os.environ.get("DPTUNE_MLFLOW_METRICS") == "all":
        return dict(metrics)
    radii = [value for name, value in metrics.items() if name.startswith(_RADIUS)]
    shown = {**metrics, **({"radius": statistics.fmean(radii)} if radii else {})}
    return {name: shown[name] for name in main_names() if name in shown and math.isfinite(shown[name])}


class CellRun(ChildRun):
    """A ``ChildRun`` that sends the main figures of a step, and keeps all of them beside its marker."""

    def log(self, step: int, metrics: dict[str, float], knobs: Mapping[str, float] | None = None) -> None:
        """Keep all figures and knobs of a step that telemetry allows, and send the main ones."""
        metrics = allowed(metrics, "research" if self._timed else "private", knobs)
        with suppress(OSError):  # on a full disk, the run ends with an error of its own
            _append(self._marker.parent / _STEPS, {"step": step, **jsonable(metrics)})
        super().log(step, main_metrics(metrics))


def steps_table(directory: Path) -> Path | None:
    """Write all figures of all steps as CSV into a run's folder, the last of each step. Returns None without any."""
    source = directory / _STEPS
    if not source.exists():
        return None
    steps: dict[int, dict[str, Any]] = {}
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):  # a killed process leaves a line unfinished
            row = json.loads(line)
            steps[row["step"]] = row
    names = list(dict.fromkeys(name for row in steps.values() for name in row))
    with replacing(directory / _TABLE) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=names)
        writer.writeheader()
        writer.writerows(steps[step] for step in sorted(steps))
    return directory / _TABLE


def _append(file: Path, row: dict[str, Any]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(json.dumps(row) + "\n")
