"""What the processes of the flows of predictions and audits do, in this process."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from tasks.audit.audit_plan import AuditPlan, audit_part
from tasks.prediction.ensembles import EnsemblePlan, tune
from tasks.prediction.scores import ScoringPlan, score_part

_ONE = Lock()  # tasks are threads, and two of them cannot load a model at once


def work_of(command: list[str]) -> None:
    """Tune a shard, score a part or audit cells, as the command says."""
    with _ONE:
        _work_of(command)


def _work_of(command: list[str]) -> None:
    if "tasks.prediction.scores" in command:
        file, part, parts = command[command.index("tasks.prediction.scores") + 1 :][:3]
        score_part(ScoringPlan.model_validate_json(Path(file).read_text()), int(part), int(parts), "cpu")
        return
    if "tasks.audit.audit_plan" in command:
        file, part, parts = command[command.index("tasks.audit.audit_plan") + 1 :][:3]
        audit_part(AuditPlan.model_validate_json(Path(file).read_text()), int(part), int(parts), "cpu")
        return
    file, shard = command[command.index("tasks.prediction.ensembles") + 1 :][:2]
    tune(EnsemblePlan.model_validate_json(Path(file).read_text()), int(shard), "cpu")
