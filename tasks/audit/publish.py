"""Sends a cell's audit to its run in MLflow. Loads no torch, for flows and reports ask for it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dptune.core.digits import at_least
from dptune.core.files import read_json, sha256, write_text
from dptune.job.result import RunResult
from dptune.privacy.run_folder import RunFolder
from tasks.audit.registry import bounds, parts
from tasks.experiment.cell_run import main_metrics
from tasks.experiment.cells import PUBLISHED
from tasks.metrics import allowed
from tasks.mlflow.tracking import add_to_run, timed
from tasks.report.numbers import could_refute


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


def _refutable(audit: dict[str, Any]) -> str:
    found = [audit[part]["epsilon_refutable"] for part in bounds() if "epsilon_refutable" in audit.get(part, {})]
    return f" (could refute: {could_refute(max(found))})" if found else ""


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
