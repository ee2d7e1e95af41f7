"""The experiment flow: runs every cell of the grid as a Prefect task, in a process of its own.

python -m flows.experiment        # what the DVC stage runs
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.futures import PrefectFuture
from prefect.runtime import flow_run

from dptune.core.errors import DptuneError
from dptune.core.progress import Meter
from dptune.privacy.run_folder import RunFolder
from flows.child import child
from flows.command import CellError, begin_flow, flow_error, hold_when_stopped, run_flow
from flows.deployed_run import run_deployed
from flows.pages import grid_name, progress_page
from flows.runners import THREADS, SharedFolder, free_place, open_runner, shared_folder, with_threads
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
from tasks.stage import ERROR_FILE, run_stage

_LAST_LINES = 15
_UNDER_WAY: list[Cell] = []  # the cells of this process' flow, for the last line after Ctrl-C
# A cell takes these variables from its flow, because Dask and Ray set them to one thread for all that workers start.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY")


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


async def _worth_retrying(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    try:
        await state.aresult()
    except CellError as error:
        return not error.hopeless
    except DptuneError:
        return False
    except Exception:
        return True
    return False


@task(
    name="fine-tune",
    task_run_name="{group.label}",
    cache_key_fn=_cache_key,
    persist_result=True,
    retry_delay_seconds=2,
    retry_condition_fn=_worth_retrying,
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
            run = _run_attached if context.terminal else run_process
            command = child("tasks.experiment.finetune", *files, *options)
            side_by_side = min(len(devices) * places, context.groups)
            run(group.label, command, home, with_threads(environment_with(context.environment), side_by_side))
    return [str(cell.directory) for cell in group.cells]


def own_threads() -> dict[str, str | None]:
    """This process' environment variables for numbers of threads; None for those that are not set."""
    return {name: os.environ.get(name) for name in _THREADS}


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process' environment with ``changes``; None removes a variable."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


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


def error_of(future: PrefectFuture[Any]) -> BaseException:
    """The exception that ended a failed task."""
    if not future.state.is_final():
        return DptuneError(f"{future.state.name}: its worker was lost. Fix: start workers again, and run again.")
    try:
        found = future.state.result(raise_on_failure=False)
    except Exception as error:
        return error
    return found if isinstance(found, BaseException) else RuntimeError(str(future.state.message))


def available_devices(settings: Experiment) -> list[str]:
    """The devices that params.yaml names, or every CUDA device, or the CPU."""
    if settings.devices != "auto":
        return list(settings.devices)
    import torch  # takes seconds, and is not needed if the devices are named

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def tags_of(settings: Experiment) -> dict[str, str]:
    """Tags that say where a run in MLflow came from."""
    return {
        "telemetry": settings.telemetry,
        "accounting": settings.accounting,
        "git_commit": tracking.git_commit(),
        **tracking.training_hash(settings.telemetry),
        **tracking.flow_tag(settings.telemetry, str(flow_run.id or "none")),
    }


def _run_attached(label: str, command: list[str], home: Path, environment: Mapping[str, str]) -> None:
    with TemporaryDirectory() as folder:
        said = Path(folder) / "error.txt"
        own = {**environment, ERROR_FILE: str(said)}
        status = subprocess.run(command, cwd=home, env=own, check=False).returncode
        if status != 0:
            hold_when_stopped()
            raise CellError(label, status, said.read_text(encoding="utf-8") if said.exists() else "")


def run_process(
    label: str,
    command: list[str],
    home: Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a process and pass its output on line by line.

    Args:
        home: the process' working directory; None for this one's.
        environment: the process' environment; None for this one's.
        on_line: called with each line.

    Raises: CellError with the last lines, if it ends with an error.
    """
    logger, last = get_run_logger(), deque[str](maxlen=_LAST_LINES)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        cwd=home,
        env=environment,
    )
    try:
        for line in _lines(process):
            last.append(line)
            logger.info("%s", line)
            on_line(line)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        hold_when_stopped()
        raise CellError(label, status, "\n".join(last))


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            yield line.rstrip()


def main() -> None:
    """Run the flow on params.yaml, which is read before Prefect starts a server."""
    settings = load_settings()
    check_inputs()
    check_models(settings)
    run_flow(lambda: run_deployed(experiment, settings), lambda: standing(_UNDER_WAY))


if __name__ == "__main__":
    run_stage(main)
