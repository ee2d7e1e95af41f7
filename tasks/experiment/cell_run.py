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

from dptune.files import PRIVATE_FILE, jsonable, replacing
from tasks.tracking import ChildRun

#: Figures of a cell that MLflow shows, at most 25. DPTUNE_MLFLOW_METRICS=all sends every figure.
MAIN_METRICS = (
    "eval_perplexity",
    "public_perplexity",
    "eval_sample_perplexity",
    "epsilon_published",
    "epsilon_noise_only",
    "epsilon_certified",
    "epsilon_audited",
    "learning_rate",
    "noise_multiplier",
    "radius",
    "gradient_norm",
    "batch_units",
    "batch_loss",
    "clipped_fraction",
    "steps_share_to_best_baseline",
    "audit_step_epsilon_audited",
    "audit_step_mu_audited",
    "audit_step_mu_certified",
    "audit_canaries_calibrated_auc",
    "audit_canaries_shadows_auc",
    "audit_membership_calibrated_auc",
    "audit_exposure_mean",
    "audit_extraction_verbatim",
    "audit_one_run_epsilon_refutable",
    "audit_sampling_p_value",
)
_STEPS, _TABLE = "steps.jsonl", "steps.csv"
_RADIUS = "radius_"


def main_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the figures that MLflow shows. Radii become their mean; infinities are left out, for no chart shows any.

    Whether an epsilon is infinite is said by the run's tags.
    """
    if os.environ.get("DPTUNE_MLFLOW_METRICS") == "all":
        return dict(metrics)
    radii = [value for name, value in metrics.items() if name.startswith(_RADIUS)]
    shown = {**metrics, **({"radius": statistics.fmean(radii)} if radii else {})}
    return {name: shown[name] for name in MAIN_METRICS if name in shown and math.isfinite(shown[name])}


class CellRun(ChildRun):
    """A ``ChildRun`` that sends the main figures of a step, and keeps all of them beside its marker."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Keep all figures of a step, and send the main ones."""
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
