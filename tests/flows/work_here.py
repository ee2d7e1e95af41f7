"""What the processes of the flows of predictions and audits do, in this process."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from tasks.audit.audit_plan import AuditPlan, audit_part
from tasks.prediction.ensembles import EnsemblePlan, tune_part
from tasks.prediction.scores import ScoringPlan, score_part

_WORK: dict[str, tuple[Any, Any]] = {
    "tasks.prediction.scores": (ScoringPlan, score_part),
    "tasks.audit.audit_plan": (AuditPlan, audit_part),
    "tasks.prediction.ensembles": (EnsemblePlan, tune_part),
}
_ONE = Lock()  # tasks are threads, and two of them cannot load a model at once


def work_of(command: list[str]) -> None:
    """Tune shards, score records or audit cells, as the command says."""
    with _ONE:
        _work_of(command)


def _work_of(command: list[str]) -> None:
    module, file, part, parts = command[-6:-2]
    plan, work = _WORK[module]
    work(plan.model_validate_json(Path(file).read_text()), int(part), int(parts), "cpu")
