"""The audit flow: attacks every finished cell of the experiment, each in a Prefect task of its own.

python -m flows.audit        # what the DVC stage runs
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.context import TaskRunContext

from dptune.core.files import private_directory, sha256, write_json
from flows.common.command import FlowError, begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.pages import progress_page
from flows.common.runners import available_devices
from flows.server import flow
from tasks.audit.attacks import audit_cell, audit_file, audit_key
from tasks.experiment.cell_list import listed_cells
from tasks.experiment.checks import check_models
from tasks.mlflow.cell_run import publish_audit
from tasks.paths import AUDITED, AUDITS, DATA, EXPERIMENT, RUNS
from tasks.report.experiment import report
from tasks.settings.experiment import Audit
from tasks.settings.params import load_settings
from tasks.stage import run_stage

_FIX = f"trust no epsilon of this run: look at {AUDITS}, report it, and audit again with another audit.seed"


def _cache_key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Key of the cached result, which lies in the audit's folder: without the folder, the attack runs again."""
    directory: Path = parameters["directory"]
    among = f"{parameters['cells']}_{parameters['seeds']}"
    return f"{directory.name}/prefect_{audit_key(directory, parameters['settings'])}_{among}"


@task(name="audit", task_run_name="{directory.name}", cache_key_fn=_cache_key, persist_result=True)
def attack(directory: Path, settings: Audit, device: str, cells: int, seeds: int) -> list[str]:
    """Attack one cell. Returns a sentence for each bound that contradicts the cell's ledger."""
    found: list[str] = audit_cell(directory, settings, device, cells, seeds)["violations"]
    return found


@flow(name="audit", log_prints=True)
def audit(params: str = "params.yaml", overrides: dict[str, Any] | None = None, folder: Path = DATA) -> list[str]:
    """Attack every cell that the last experiment listed.

    Args:
        folder: where that list lies, and the list of the audits is written.

    Raises: FlowError if an attack shows more epsilon than a ledger certifies, or cannot be made, after all others.
    """
    begin_flow()
    settings, logger = load_settings(Path(params), overrides), get_run_logger()
    device, show = available_devices(settings.experiment)[0], progress_page("audits")
    private_directory(AUDITS)
    configured = attack.with_options(result_storage=AUDITS.resolve())
    violations: list[str] = []
    errors: dict[str, BaseException] = {}
    cells = [RUNS / name for name in listed_cells(folder / EXPERIMENT.name)]
    alike = Counter(map(_without_seed, cells))
    for number, directory in enumerate(cells, start=1):
        again = configured.with_options(refresh_cache=not audit_file(directory).exists())
        seeds = alike[_without_seed(directory)]
        state = again(directory, settings.audit, device, len(cells), seeds, return_state=True)
        found = state.result(raise_on_failure=False)
        if audit_file(directory).exists():
            publish_audit(directory, audit_file(directory))  # an earlier audit may not have reached MLflow
        if isinstance(found, BaseException):
            errors[directory.name] = found
        else:
            violations += found
        logger.info("%d of %d audits: %s", number, len(cells), directory.name)
        show(number / len(cells), f"{number} of {len(cells)} audits")
    if violations or errors:
        _write_page(settings.experiment.name, folder)
        summary = "; ".join([*violations, *(f"{name}: {error}" for name, error in errors.items())])
        failed = flow_error(summary, list(errors.values())) if errors else None
        raise failed if failed and not violations else FlowError(summary, f"{violations[0]}. Fix: {_FIX}.", status=1)
    files = {directory.name: audit_file(directory) for directory in cells}
    write_json(folder / AUDITED.name, {name: sha256(file) for name, file in files.items()})
    return [str(file) for file in files.values()]


def _without_seed(directory: Path) -> str:
    """The label of the cell in ``directory`` up to its seed; cells whose folders have other names count as one."""
    return directory.name.rpartition(".seed")[0]


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
