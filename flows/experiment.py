"""The experiment flow: runs every cell of the grid as a Prefect task, in a process of its own; and makes the data.

python -m flows.experiment        # what the DVC stage runs
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.progress import Meter
from dptune.privacy.run_folder import RunFolder
from flows.common.child import child
from flows.common.command import CellError, begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.pages import grid_name, progress_page
from flows.common.processes import worth_retrying
from flows.common.runners import (
    THREADS,
    SharedFolder,
    available_devices,
    environment_with,
    error_of,
    free_place,
    open_runner,
    own_threads,
    run_attached,
    run_process,
    shared_folder,
    with_threads,
)
from flows.server import flow
from tasks.experiment.cell_list import CellGroup, group_cells, renamed_runs, standing, write_list
from tasks.experiment.cells import Cell, grid, is_finished, is_published, write_cell
from tasks.experiment.checks import check_inputs, check_models
from tasks.experiment.spent_budgets import paid_so_far
from tasks.mlflow import tracking
from tasks.mlflow.page import run_ids, show
from tasks.paths import DATA, EXPERIMENT, RUNS
from tasks.settings.experiment import Experiment
from tasks.settings.mechanisms import own_epsilons
from tasks.settings.params import Settings, load_settings, merge
from tasks.settings.strict import PlainNumbers
from tasks.stage import run_stage

#: The stages that make what the experiment reads; DVC runs those before them too, and none that nothing changed.
DATA_STAGES = ("canaries", "split", "validation", "pretrain", "models")
#: All of them, in DVC's order, for the share that is done.
ALL_STAGES = ("checks", "acquire", "verbalize", "split", "canaries", "validation", "pretrain", "models")
#: Sections that these stages read from params.yaml, and from nowhere else.
_OF_THE_FILE = ("plugins", "data", "canaries", "pretrain")
_STAGE = re.compile(r"(?:Running stage|Stage) '(?P<name>[^']+)'")
_UNDER_WAY: list[Cell] = []  # the cells of this process' flow, for the last line after Ctrl-C


@dataclass(frozen=True)
class DispatchContext:
    """All that a cell's task needs besides the cell, on whichever machine it runs. Public.

    Attributes:
        settings: the experiment's settings.
        parent: the experiment's run in MLflow.
        place: the flow's working directory, which every machine must see.
        environment: environment variables for the cell's process; None removes one.
        groups: number of groups of cells in the flow, each of which runs in one process.
        terminal: whether the flow runs at a terminal.
    """

    settings: Experiment
    parent: str
    place: SharedFolder
    environment: Mapping[str, str | None]
    groups: int
    terminal: bool


def _cache_key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    """Key of the cached result, which lies in the cell's own folder: a run that is set aside takes it along."""
    return str(parameters["group"].key)


@task(
    name="fine-tune",
    task_run_name="{group.label}",
    cache_key_fn=_cache_key,
    persist_result=True,
    retry_delay_seconds=2,
    retry_condition_fn=worth_retrying,
)
def fine_tune(group: CellGroup, context: DispatchContext) -> list[str]:
    """Run cells to their ends in one process, on the first free device of the machine that this runs on.

    A retry resumes from their ledgers and checkpoints. Returns: the cells' folders.
    """
    os.umask(0o077)  # a worker's umask is that of the shell that started it
    context.place.check()
    home = context.place.path
    for cell in group.cells:
        write_cell(cell, home)
    is_done = is_finished if context.parent == tracking.LATER else is_published
    if not all(is_done(home / cell.directory) for cell in group.cells):
        devices, places = available_devices(context.settings), context.settings.cells_per_device
        with free_place(devices, places) as device:
            files = [str(RunFolder(cell.directory).cell) for cell in group.cells]
            options = ["--device", device, "--parent", context.parent, "--flow-run", str(flow_run.id or "none")]
            # The cells may be locked by another flow, or by the process of a killed worker, which ends a moment later.
            options.append("--wait")
            # A single process at a terminal draws its own progress bars; otherwise its output becomes log lines.
            run = run_attached if context.terminal else run_process
            command = child("tasks.experiment.finetune", *files, *options)
            side_by_side = min(len(devices) * places, context.groups)
            run(group.label, command, home, with_threads(environment_with(context.environment), side_by_side))
    return [str(cell.directory) for cell in group.cells]


def _run_name() -> str:
    """The name of the run under way, from its parameters: a work pool, or Python, starts it with none of ours."""
    given = {name: value for name, value in flow_run.parameters.items() if name != "folder"}
    try:
        return grid_name(_settings(**given))
    except DptuneError:  # the flow itself says what is wrong
        return "experiment"


@flow(name="experiment", flow_run_name=_run_name, log_prints=True)
def experiment(
    epsilons: Annotated[list[float], PlainNumbers()] | None = None,
    mechanisms: list[str] | None = None,
    seeds: Annotated[list[int], PlainNumbers()] | None = None,
    runner: str | None = None,
    params: str = "params.yaml",
    overrides: dict[str, Any] | None = None,
    folder: Path = DATA,
) -> list[str]:
    """Fine-tune every cell of the grid, and return the cells' folders.

    Args:
        epsilons: privacy budgets in place of the file's; an entry of ``mechanisms`` with its own keeps those.
        mechanisms: labels in place of the file's.
        seeds: seeds in place of the file's.
        runner: threads, dask, ray, or the address of a running cluster, in place of the file's.
        params: the parameter file.
        overrides: sections to merge over the parameter file, such as ``{"training": {"epochs": 3}}``.
        folder: where the list of the cells is written; a study that is not params.yaml's has its own.

    Raises: DataError naming the stage whose records are missing; FlowError naming every cell that failed, after all
    others have run.
    """
    begin_flow()
    settings = _settings(params, overrides, epsilons=epsilons, mechanisms=mechanisms, seeds=seeds, runner=runner)
    check_inputs()
    cells, devices = grid(settings), _own_devices(settings.experiment)
    private = settings.experiment.telemetry == "private"  # whether records are those of before
    if not all(is_finished(cell.directory) for cell in cells) and (paid := paid_so_far(private=private)):
        get_run_logger().info("%s", paid)
    for renamed in renamed_runs(cells):
        get_run_logger().warning("%s", renamed)
    if own := own_epsilons(settings.mechanisms, settings.experiment):
        get_run_logger().info("%s", kept_epsilons(own, settings.experiment))
    _UNDER_WAY[:] = cells
    places = len(devices) * settings.experiment.cells_per_device
    groups = group_cells(cells, settings.experiment.cells_together, places)
    with shared_folder(settings.experiment.runner) as place, open_runner(settings.experiment, places) as task_runner:
        timed = tracking.timed(settings.experiment.telemetry)
        parent = tracking.parent_run(settings.experiment.name, tags_of(settings.experiment), timed=timed)
        context = _context(settings.experiment, devices, parent, place, len(groups))
        configured = fine_tune.with_options(retries=settings.experiment.retries, result_storage=RUNS.resolve())
        futures = [
            task_runner.submit(
                configured.with_options(refresh_cache=_is_owed_to_mlflow(group, parent)),
                {"group": group, "context": context},
            )
            for group in groups
        ]
        failed, errors = _failures(groups, futures)
    write_list(folder / EXPERIMENT.name, settings.experiment.name, [cell.directory for cell in cells])
    tracking.finish_parent(parent, failed=bool(failed), timed=timed)
    links = show(parent, run_ids(cell.directory for cell in cells), settings.experiment.telemetry)
    if links:
        logger = get_run_logger()
        logger.info("MLflow (make ui), the cells in a table:  %s", links.table)
        logger.info("MLflow (make ui), the cells in charts:   %s", links.charts)
    if failed:
        raise flow_error(f"{len(failed)} of {len(cells)} cells failed: {', '.join(failed)}", errors)
    return [str(cell.directory) for cell in cells]


def _settings(params: str, overrides: dict[str, Any] | None, **chosen: Any) -> Settings:
    given = {key: value for key, value in chosen.items() if value is not None}
    return load_settings(Path(params), merge(overrides or {}, {"experiment": given}))


def kept_epsilons(own: Mapping[str, Sequence[float]], settings: Experiment) -> str:
    """The sentence that says which mechanisms do not run at the experiment's epsilons, which a form may have given."""
    listed = "; ".join(f"{name} at {_numbers(epsilons)}" for name, epsilons in own.items())
    others = f" (here {_numbers(settings.epsilons)})" if settings.epsilons else ""
    return f"entries of params.yaml with epsilons of their own keep those, whatever the experiment's{others}: {listed}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _is_owed_to_mlflow(group: CellGroup, parent: str) -> bool:
    """Whether a trained cell's results did not reach MLflow yet. Prefect's cached result does not show it."""
    folders = [cell.directory for cell in group.cells]
    return parent != tracking.LATER and any(is_finished(path) and not is_published(path) for path in folders)


def _own_devices(settings: Experiment) -> list[str]:
    """The devices of the flow's own machine; none if a running cluster does the work."""
    return [] if "://" in settings.runner else available_devices(settings)


def _context(
    settings: Experiment, devices: list[str], parent: str, place: SharedFolder, groups: int
) -> DispatchContext:
    lone = settings.runner == THREADS and len(devices) * settings.cells_per_device == 1
    environment = own_threads() | {"MLFLOW_TRACKING_URI": tracking.tracking_uri()}
    return DispatchContext(settings, parent, place, environment, groups, terminal=lone and sys.stderr.isatty())


def _failures(
    groups: list[CellGroup], futures: list[PrefectFuture[list[str]]]
) -> tuple[list[str], list[BaseException]]:
    """Wait for every cell. Returns the labels of cells that failed, and their errors."""
    logger, done, show = get_run_logger(), 0, progress_page("cells")
    failed: list[str] = []
    errors: list[BaseException] = []
    total = sum(len(group.cells) for group in groups)
    with Meter("all cells", total=total, unit="cells") as meter:
        for group, future in zip(groups, futures, strict=True):
            future.wait()
            state, done = future.state, done + len(group.cells)
            meter.update(done)
            show(done / total, f"{done} of {total} cells")
            name = (state.name or state.type).lower() if state.is_final() else "lost with its worker, again and again"
            logger.info("%d of %d cells: %s %s", done, total, group.label, name)
            if not state.is_completed():
                failed += [cell.label for cell in group.unfinished_cells or group.cells]
                errors.append(error_of(future))
    return failed, errors


def tags_of(settings: Experiment) -> dict[str, str]:
    """Tags that say where a run in MLflow came from."""
    return {
        "telemetry": settings.telemetry,
        "accounting": settings.accounting,
        "git_commit": tracking.git_commit(),
        **tracking.training_hash(settings.telemetry),
        **tracking.flow_tag(settings.telemetry, str(flow_run.id or "none")),
    }


# The experiment's data: the DVC stages before it, as a task.


@task(name="data", task_run_name="data and public model", cache_policy=NO_CACHE)
def make_data(on_stage: Callable[[str], None], stages: Sequence[str] = DATA_STAGES) -> None:
    """Run the DVC stages that the experiment reads from, where something changed.

    Args:
        on_stage: called with the name of each stage that DVC comes to.
        stages: the last ones, for work that reads fewer.

    Raises: FlowError with the cause of the stage that failed.
    """

    def look(line: str) -> None:
        if found := _STAGE.match(line):
            on_stage(found["name"])

    try:
        run_process("data", child("dvc", "repro", *stages), on_line=look)
    except CellError as error:
        raise flow_error("the data could not be made", [error]) from error


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ConfigError for a section that the data's stages would not see."""
    for section in _OF_THE_FILE:
        if section in overrides:
            fix = "change it in params.yaml, and leave it out here"
            raise ConfigError(f"overrides.{section}", "the data's stages read it only from params.yaml", fix=fix)


def main() -> None:
    """Run the flow on params.yaml, which is read before Prefect starts a server."""
    settings = load_settings()
    check_inputs()
    check_models(settings)
    run_flow(lambda: run_deployed(experiment, settings), lambda: standing(_UNDER_WAY))


if __name__ == "__main__":
    run_stage(main)
