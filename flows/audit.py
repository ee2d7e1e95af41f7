"""The audit flow: attacks every finished cell of the experiment, as many at a time as cells train, each process on a
device of its own.

python -m flows.audit        # what the DVC stage runs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import get_run_logger

from dptune.core.errors import DptuneError
from dptune.core.files import private_directory, read_json, sha256, write_json
from flows.common.command import FlowError, begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.pages import progress_page
from flows.common.processes import WAIT, run_parts
from flows.server import flow
from tasks.audit.attacks import audit_file
from tasks.audit.audit_plan import AUDIT_PLAN, MADE, AuditPlan
from tasks.experiment.cell_list import listed_cells
from tasks.experiment.checks import check_models
from tasks.mlflow.cell_run import publish_audit
from tasks.paths import AUDITED, AUDITS, DATA, EXPERIMENT, RUNS
from tasks.report.experiment import report
from tasks.settings.params import load_settings
from tasks.stage import run_stage

_FIX = f"trust no epsilon of this run: look at {AUDITS}, report it, and audit again with another audit.seed"


@flow(name="audit", log_prints=True)
def audit(params: str = "params.yaml", overrides: dict[str, Any] | None = None, folder: Path = DATA) -> list[str]:
    """Attack every cell that the last experiment listed.

    Args:
        folder: where that list lies, and the list of the audits is written.

    Raises: FlowError if an attack shows more epsilon than a ledger certifies, or cannot be made, after all others.
    """
    begin_flow()
    settings, show = load_settings(Path(params), overrides), progress_page("audits")
    private_directory(AUDITS)
    plan, file = AuditPlan(cells=listed_cells(folder / EXPERIMENT.name), settings=settings.audit), folder / AUDIT_PLAN
    write_json(file, plan.model_dump(mode="json"))
    waiting = [cell for cell in plan.cells if not plan.is_made(cell)]
    ended = len(plan.cells) - len(waiting)

    def on_line(line: str) -> None:
        nonlocal ended
        if MADE in line:
            ended += 1
            show(ended / len(plan.cells), f"{ended} of {len(plan.cells)} audits")

    errors = run_parts("audits", "tasks.audit.audit_plan", file, len(waiting), settings.experiment, on_line)
    made = [cell for cell in plan.cells if plan.is_made(cell)]
    for cell in made:
        publish_audit(RUNS / cell, audit_file(RUNS / cell))  # an earlier audit may not have reached MLflow
    get_run_logger().info("%d of %d audits are made", len(made), len(plan.cells))
    violations = [one for cell in made for one in read_json(audit_file(RUNS / cell))["violations"]]
    if violations or len(made) < len(plan.cells):
        _write_page(settings.experiment.name, folder)
        failed = [f"{cell} could not be audited" for cell in plan.cells if cell not in made]
        summary = "; ".join([*violations, *failed])
        if violations:
            raise FlowError(summary, f"{violations[0]}. Fix: {_FIX}.", status=1)
        raise flow_error(summary, errors or [DptuneError(f"{AUDITS}: another process audits there. Fix: {WAIT}.")])
    write_json(folder / AUDITED.name, {cell: sha256(audit_file(RUNS / cell)) for cell in made})
    return [str(audit_file(RUNS / cell)) for cell in made]


def _write_page(name: str, folder: Path) -> None:
    """Write the report's page. DVC skips the report when this stage fails, and the page shows what was found."""
    try:
        report(name, folder)
    except Exception as error:
        get_run_logger().warning("the report could not be written: %s", error)


def main() -> None:
    """Run the flow on params.yaml; a violation ends it with its sentence and status 1."""
    settings = load_settings()
    listed_cells(EXPERIMENT)
    check_models(settings)
    named = audit.with_options(flow_run_name=lambda: f"audit of {settings.experiment.name}")
    run_flow(lambda: run_deployed(named, settings))


if __name__ == "__main__":
    run_stage(main)
