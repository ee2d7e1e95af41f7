"""Writes a cell's history and its result, and sends them to MLflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dptune.files import jsonable, naming, sha256, write_text
from dptune.mechanisms.rl import LearnedControl
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import Spending, earlier_runs, spending_of
from tasks.experiment.cells import PUBLISHED
from tasks.experiment.prepare import PreparedCell
from tasks.paths import TRAIN
from tasks.tracking import LATER, ChildRun, add_to_run, dvc_hash, flow_tag, git_commit, timed

GUARANTEE = {
    "research": "The guarantee covers the adapter, NOT the curves and metrics computed from private records.",
    "private": (
        "The guarantee covers the adapter and all published values (releases, public data, an auditor's own secrets), "
        "NOT the times that Prefect's database, logs and files keep, which stay with the owner."
    ),
}
_MOST_KNOBS = 400  # number of rows of knobs that a run keeps for pictures


def guarantee(
    telemetry: str,
    leaks: tuple[str, ...],
    inherited: bool = False,
    together: tuple[float, float] | None = None,
    plugins: tuple[str, ...] = (),
) -> str:
    """A few sentences on what a run's certified epsilon covers.

    Args:
        inherited: whether the run started from another run's hyper-policy.
        together: epsilon and delta of this run together with those of its cell that were set aside; None without any.
        plugins: the plug-ins that hold code of the mechanism.
    """
    if leaks:
        return f"No guarantee: {'; '.join(leaks)}."
    more = " It includes what the run of its hyper-policy spent." if inherited else ""
    if plugins:
        more += f" It holds if plug-ins do what they say: {', '.join(plugins)}."
    if together:
        more += (
            " Runs of this cell that were set aside released about the same records: with them, "
            f"epsilon is {together[0]:.4g} and delta {together[1]:.3g} (basic composition)."
        )
    return GUARANTEE[telemetry] + more


def set_aside_of(directory: Path) -> list[Spending]:
    """What each earlier run of this cell spent before it was set aside."""
    return [spent for folder in earlier_runs(directory) if (spent := spending_of(folder))]


class History:
    """Two files that grow during a run: points of the learning curves, and values of the knobs."""

    def __init__(self, directory: Path, steps: int) -> None:
        self._points, self._knobs = RunFolder(directory).history, RunFolder(directory).knobs
        self._every = max(1, steps // _MOST_KNOBS)
        self._last: dict[str, float] = {}

    def add_point(self, point: dict[str, float]) -> None:
        """Append a point of the learning curves."""
        _append(self._points, point)

    def add_knobs(self, releases: int, knobs: dict[str, float]) -> bool:
        """Append the knobs if they changed, at most 400 rows a run. Returns whether they were appended."""
        if knobs == self._last or (self._last and releases % self._every):
            return False
        self._last = dict(knobs)
        _append(self._knobs, {"releases": releases, **knobs})
        return True

    def points(self) -> list[dict[str, Any]]:
        """All points of the learning curves, those of earlier processes included."""
        return _rows(self._points)

    def knobs(self) -> list[dict[str, Any]]:
        """All rows of knobs, those of earlier processes included."""
        return _rows(self._knobs)


def _append(path: Path, point: dict[str, float]) -> None:
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(jsonable(point)) + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows so far; a line that a killed process left unfinished is skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def result_of(
    prepared: PreparedCell,
    contents: LedgerContents,
    before: dict[str, float],
    after: dict[str, float],
    history: History,
    seconds: float,
    device: str,
) -> dict[str, Any]:
    """The result of a finished cell for reports, in plain JSON types."""
    cell, spec, prices = prepared.cell, prepared.spec, contents.epsilons
    aside = set_aside_of(cell.directory)
    epsilon = prices.certified + sum(one.epsilon for one in aside)
    together = (epsilon, cell.delta + sum(one.delta for one in aside)) if aside else None
    return {
        "label": cell.label,
        "model": cell.model_name,
        "mechanism": cell.mechanism,
        "budget_epsilon": cell.epsilon,
        "seed": cell.seed,
        "agent": isinstance(spec.mechanism.controller, LearnedControl),
        "unit": spec.units.kind,
        "units": len(spec.units),
        "delta": cell.delta,
        "accounting": cell.accounting,
        "telemetry": cell.telemetry,
        "guarantee": guarantee(
            cell.telemetry, prices.leaks, bool(spec.header.inherited), together, spec.header.plugins
        ),
        "set_aside": [jsonable({"epsilon_certified": one.epsilon}) | {"folder": one.folder} for one in aside],
        "data": prepared.about["label"],
        "synthetic": bool(prepared.about["synthetic"]),
        "noise_multiplier": spec.mechanism.noise.noise_multiplier,
        "sample_rate": spec.plan.sample_rate,
        "releases": contents.releases,
        "planned_releases": spec.plan.steps,
        **jsonable(prices.to_dict()),
        "leaks": list(prices.leaks),
        "before": jsonable(before),
        "after": jsonable(after),
        "history": history.points(),
        "pairs": list(prepared.pairs),
        "crafted": cell.crafted,
        "knobs": history.knobs(),
        "seconds": round(seconds, 1) if timed(cell.telemetry) else None,
        "device": device,
    }


def child_run(prepared: PreparedCell, parent: str | None, flow_run: str) -> ChildRun | None:
    """The cell's run in MLflow, started or continued; None without a parent."""
    if parent is None:
        return None
    cell, spec = prepared.cell, prepared.spec
    params = {
        "model": cell.model.source,
        "mechanism": cell.mechanism,
        **{f"mechanism.{key}": value for key, value in cell.options.items()},
        "budget_epsilon": cell.epsilon,
        "delta": cell.delta,
        "accounting": cell.accounting,
        "seed": cell.seed,
        "unit": spec.units.kind,
        "units": len(spec.units),
        "noise_multiplier": spec.mechanism.noise.noise_multiplier,
        "sample_rate": spec.plan.sample_rate,
        "steps": spec.plan.steps,
        "pairs": spec.mechanism.pairs,
        "crafted": cell.crafted,
        **{f"lora.{key}": value for key, value in cell.lora.model_dump().items()},
        **{f"training.{key}": value for key, value in cell.training.model_dump().items()},
    }
    tags = {
        "telemetry": cell.telemetry,
        "data": prepared.about["label"],
        "data_kind": "SYNTHETIC" if prepared.about["synthetic"] else "real",
        "git_commit": git_commit(),
        "dvc_hash": dvc_hash(TRAIN.parent),
        **flow_tag(cell.telemetry, flow_run),
    }
    return ChildRun(parent, cell.label, RunFolder(cell.directory).mlflow_run, params, tags, timed=timed(cell.telemetry))


def publish(directory: Path, parent: str | None) -> None:
    """Send a finished cell's results to MLflow, once; after a crash, whatever was not sent yet.

    Where MLflow takes nothing, a warning says so, and the next flow tries again.
    """
    marker = directory / PUBLISHED
    if parent in (None, LATER) or marker.exists():
        return
    folder = RunFolder(directory)
    contents, result = read_ledger(folder.ledger), json.loads(folder.result.read_text())
    when = {"timed": timed(result["telemetry"]), "kept": False}  # all of this can be made again
    child = ChildRun(str(parent), result["label"], folder.mlflow_run, {}, {}, **when)
    final = {f"final_{key}": value for key, value in contents.epsilons.to_dict().items()}
    child.log(contents.releases, {key: float(value) for key, value in result["after"].items()} | final)
    child.tag({"ledger_run_id": contents.header.run_id, "guarantee": result["guarantee"]})
    for made in (folder.ledger, folder.adapter, folder.result, directory / "curves.png"):
        child.artifact(made)
    # A hyper-policy that leaks holds statistics of raw gradient norms; it stays in the run's private folder.
    if folder.controller.exists() and not result["leaks"]:
        child.artifact(folder.controller)
    if child.end():
        write_text(marker, child.run_id)


def publish_audit(directory: Path, audit: Path) -> None:
    """Send a cell's audit to its run in MLflow, if it has one and MLflow does not have this audit yet."""
    run, marker, digest = RunFolder(directory).mlflow_run, audit.with_name(PUBLISHED), sha256(audit)
    if not run.exists() or (marker.exists() and marker.read_text() == digest):
        return
    metrics = audit_metrics(json.loads(audit.read_text(encoding="utf-8")))
    telemetry = json.loads(RunFolder(directory).result.read_text(encoding="utf-8"))["telemetry"]
    if add_to_run(run.read_text().strip(), metrics, audit, timed=timed(telemetry)):
        write_text(marker, digest)


def audit_metrics(audit: dict[str, Any]) -> dict[str, float]:
    """The figures of an audit that runs are compared by, under flat names."""
    metrics = {"epsilon_audited": audit["one_run"]["epsilon_audited"]} if "one_run" in audit else {}
    attacks = ("one_run", "crafted", "draw", "sampling", "step", "extraction", "exposure")
    parts = {name: audit.get(name, {}) for name in attacks}
    for name in ("canaries", "membership"):
        parts |= {f"{name}_{score}": figures for score, figures in audit.get(name, {}).items()}
    for name, figures in parts.items():
        numbers = {key: value for key, value in figures.items() if isinstance(value, int | float)}
        metrics |= {f"audit_{name}_{key}": float(value) for key, value in numbers.items()}
    return metrics
