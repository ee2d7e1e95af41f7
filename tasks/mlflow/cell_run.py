"""Cell's run in MLflow: the few figures that runs are compared by, of its steps and of its audit.

All other figures go to a table among its files. No torch is loaded, for flows and reports ask for this too.
"""

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

from dptune.core.digits import at_least
from dptune.core.files import PRIVATE_FILE, jsonable, read_json, replacing, sha256, write_text
from dptune.job.result import RunResult
from dptune.privacy.run_folder import RunFolder
from tasks.audit.registry import bounds, parts
from tasks.experiment.cells import PUBLISHED
from tasks.metrics import allowed, shown_in
from tasks.mlflow.tracking import ChildRun, add_to_run, timed
from tasks.report.numbers import could_refute

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


def publish_audit(directory: Path, audit: Path) -> None:
    """Send a cell's audit to its run in MLflow, if it has one and MLflow does not have this audit yet."""
    run, marker, digest = RunFolder(directory).mlflow_run, audit.with_name(PUBLISHED), sha256(audit)
    if not run.exists() or (marker.exists() and marker.read_text() == digest):
        return
    made = read_json(audit)
    metrics = audit_metrics(made)
    telemetry = RunResult.read(RunFolder(directory).result).telemetry
    shown = metrics.get("epsilon_audited", metrics.get("audit_crafted_epsilon_audited"))
    tags = {} if shown is None else {"epsilon audited": f"≥ {at_least(shown)}{_refutable(made)}"}
    if add_to_run(
        run.read_text().strip(), allowed(main_metrics(metrics), telemetry), audit, tags, timed=timed(telemetry)
    ):
        write_text(marker, digest)


def audit_metrics(audit: dict[str, Any]) -> dict[str, float]:
    """The figures of an audit that runs are compared by, under flat names."""
    metrics = {"epsilon_audited": audit["one_run"]["epsilon_audited"]} if "one_run" in audit else {}
    found: dict[str, dict[str, Any]] = {}
    for part in (part for part in parts() if part.key in audit):
        tables = (
            {f"_{score}": table for score, table in audit[part.key].items()} if part.by_score else {"": audit[part.key]}
        )
        found |= {f"{part.key}{score}": table for score, table in tables.items()}
    for name, figures in found.items():
        numbers = {key: value for key, value in figures.items() if isinstance(value, int | float)}
        metrics |= {f"audit_{name}_{key}": float(value) for key, value in numbers.items()}
    return metrics


def _refutable(audit: dict[str, Any]) -> str:
    found = [audit[part]["epsilon_refutable"] for part in bounds() if "epsilon_refutable" in audit.get(part, {})]
    if not found:
        return ""
    said = could_refute(max(found))
    return f" (could refute: {said})" if max(found) > 0 else f" ({said})"
