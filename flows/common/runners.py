"""Runners: where a flow's parts run, on which machine and device, and as which process.

Prefect's task runner is the one that ``experiment.runner`` names:

threads              the flow's process starts every cell on its own machine
dask, ray            a temporary cluster of this machine, which ends with the flow
tcp://host:8786      a running Dask scheduler (tls:// too)
ray://host:10001     a running Ray cluster
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory
from typing import Any

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import locked, private_directory
from flows.common.command import CellError, hold_when_stopped
from tasks.paths import DATA
from tasks.settings.experiment import Experiment
from tasks.stage import ERROR_FILE

THREADS = "threads"
_LAST_LINES = 15
# A cell takes these variables from its flow, because Dask and Ray set them to one thread for all that workers start.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY")


@contextmanager
def open_runner(settings: Experiment, places: int) -> Iterator[TaskRunner[Any]]:
    """Context with the task runner that ``settings.runner`` names, ready for work.

    Args:
        places: number of cells that a temporary cluster runs at a time.

    Raises: ConfigError for an extra that is not installed, a cluster that does not answer, and a Prefect server that
        workers cannot reach.
    """
    with ExitStack() as stack:
        if settings.runner != THREADS:
            stack.enter_context(_reachable_api(settings.runner))
        runner = stack.enter_context(_connect(settings.runner, places))
        if _is_ray(settings.runner):
            stack.enter_context(_gpu_share(settings))
        yield runner


@contextmanager
def _connect(runner: str, places: int) -> Iterator[TaskRunner[Any]]:
    with ExitStack() as stack:
        try:
            entered = stack.enter_context(_task_runner(runner, places))
            getattr(entered, "client", None)  # Dask's runner connects when its client is first read
        except OSError as error:
            fix = "start the cluster, or correct the address"
            raise ConfigError("experiment.runner", f"no answer from {runner} ({error})", fix=fix) from None
        yield entered


def _task_runner(runner: str, places: int) -> TaskRunner[Any]:
    if runner == THREADS:
        return ThreadPoolTaskRunner()
    return _ray(runner, places) if _is_ray(runner) else _dask(runner, places)


def _dask(runner: str, places: int) -> TaskRunner[Any]:
    build = _integration("prefect_dask", "dask").DaskTaskRunner
    logging.getLogger("distributed").setLevel(logging.WARNING)  # otherwise every connection is a log line
    if runner != "dask":
        return build(address=runner)
    # Without TLS, any other user of this machine could make a worker run code. And without a dashboard both still serve
    # figures over HTTP, to every user: how many tasks there are, which of a search is secret.
    import_module("dask").config.set({f"distributed.{part}.http.routes": [] for part in ("scheduler", "worker")})
    quiet = {"DASK_LOGGING__DISTRIBUTED": "warning"}
    free_port = {"dashboard_address": "127.0.0.1:0"}  # of what is left of that server, which knows no page
    local = {"security": True, "dashboard_address": None, "scheduler_kwargs": free_port, "env": quiet}
    return build(cluster_kwargs={"n_workers": places, "threads_per_worker": 1, **local})


def _ray(runner: str, places: int) -> TaskRunner[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # otherwise anybody who reaches the cluster can run code on it
    build = _integration("prefect_ray", "ray").RayTaskRunner
    if runner != "ray":
        return build(address=runner)
    # "local", because without an address Ray joins the last cluster that it knew of on this machine.
    return build(init_kwargs={"address": "local", "num_cpus": places, "include_dashboard": False})


def _is_ray(runner: str) -> bool:
    return runner == "ray" or runner.startswith("ray://")


def _integration(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        problem = f"needs the extra {extra} ({error.name} is not installed)"
        raise ConfigError("experiment.runner", problem, fix=f"pip install 'dptune[{extra}]'") from None


@contextmanager
def _reachable_api(runner: str) -> Iterator[None]:
    """Context in which workers know the address of the flow's Prefect server; otherwise each would start its own."""
    url = get_current_settings().api.url
    if url is None and "://" in runner:
        problem = "workers of a running cluster cannot reach a flow's temporary Prefect server"
        raise ConfigError("experiment.runner", problem, fix="start one (prefect server start) and set PREFECT_API_URL")
    if url is None:
        with get_client(sync_client=True) as client:
            url = str(client.api_url)
    with temporary_settings({PREFECT_API_URL: url.rstrip("/")}):
        yield


def _gpu_share(settings: Experiment) -> AbstractContextManager[Any]:
    """Let each cell ask a Ray cluster with GPUs for its share of a GPU, so that Ray sends it to a machine with one."""
    if settings.devices != "auto" or not import_module("ray").cluster_resources().get("GPU"):
        return nullcontext()
    share = int(10_000 / settings.cells_per_device) / 10_000  # Ray counts GPUs in steps of 1e-4
    options: AbstractContextManager[Any] = import_module("prefect_ray.context").remote_options(num_gpus=share)
    return options


def available_devices(settings: Experiment) -> list[str]:
    """The devices that params.yaml names, or every CUDA device, or the CPU."""
    if settings.devices != "auto":
        return list(settings.devices)
    import torch  # takes seconds, and is not needed if the devices are named

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


# Limits how many cells run on a device of this machine at a time, across all flows and checkouts.


_SECONDS = 0.5
_log = logging.getLogger("dptune.places")  # the flow's own log, and so its terminal's
_own: list[str] = []  # devices of the places that this process holds


def places_folder() -> Path:
    """Folder of the locked files, one for all checkouts and flows: DPTUNE_PLACES, or in the temporary folder."""
    given = os.environ.get("DPTUNE_PLACES")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"dptune-places-{os.getuid()}"


@contextmanager
def free_place(devices: Sequence[str], cells: int, folder: Path | None = None) -> Iterator[str]:
    """Wait for a free place on one of ``devices``, each of which has ``cells`` places. Yields the device.

    A place is a locked file, so the place of a killed process is free at once. A concurrency slot of a Prefect server
    would stay taken until its lease ends, and flows that share a temporary server's database would free each other's.

    Args:
        folder: folder of the locked files; None takes ``places_folder``.
    """
    folder = folder or places_folder()
    private_directory(folder)
    with ExitStack() as stack:
        device = _take(stack, [(device, place) for place in range(cells) for device in devices], folder)
        _own.append(device)
        stack.callback(_own.remove, device)
        yield device


def with_threads(environment: Mapping[str, str], places: int) -> dict[str, str]:
    """``environment``, with a place's share of this machine's cores as its number of threads where it has none."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // places)), **environment}


def _take(stack: ExitStack, places: list[tuple[str, int]], folder: Path) -> str:
    said = False
    while True:
        for device, place in places:
            with suppress(DptuneError):
                stack.enter_context(locked(folder / f"{gethostname()}-{_physical(device)}-{place}"))
                return device
        if not (_own or said):
            _log.warning("other flows on this machine hold all %d places (locks in %s): waiting", len(places), folder)
            said = True
        time.sleep(_SECONDS)


def _physical(device: str) -> str:
    """The physical name of a device: "cuda:0" is another GPU in a process with other CUDA_VISIBLE_DEVICES."""
    kind, _, index = device.partition(":")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if kind == "cuda" and visible:
        index = visible.split(",")[int(index or 0)].strip()
    return f"{kind}-{index or 0}"


# The flow's working directory as the machines of a cluster must see it: this very one, no copy under the same path.


@dataclass(frozen=True)
class SharedFolder:
    """A folder that other machines must see.

    Attributes:
        path: its path, the same everywhere.
        mark: name of an empty folder in its ``data`` that is there as long as the flow runs; empty for none.
    """

    path: Path
    mark: str = ""

    def check(self) -> None:
        """Raise DptuneError if this machine does not see the folder, or sees another one."""
        if not (self.path / DATA / self.mark).is_dir():
            problem = f"the worker on {gethostname()} sees no {self.path / DATA}, or another one than the flow's"
            fix = "share the flow's folder with every machine, under the same path"
            raise DptuneError(f"experiment.runner: {problem}. Fix: {fix}.")


@contextmanager
def shared_folder(runner: str) -> Iterator[SharedFolder]:
    """Context with the working directory, marked for the workers if ``runner`` is the address of a cluster."""
    if "://" not in runner:
        yield SharedFolder(Path.cwd())
        return
    with TemporaryDirectory(prefix=".flow-", dir=DATA) as mark:
        yield SharedFolder(Path.cwd(), Path(mark).name)


# Processes of a flow's parts, each with the flow's own numbers of threads.


def own_threads() -> dict[str, str | None]:
    """This process' environment variables for numbers of threads; None for those that are not set."""
    return {name: os.environ.get(name) for name in _VARIABLES}


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process' environment with ``changes``; None removes a variable."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def run_attached(label: str, command: list[str], home: Path, environment: Mapping[str, str]) -> None:
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


def error_of(future: PrefectFuture[Any]) -> BaseException:
    """The exception that ended a failed task."""
    if not future.state.is_final():
        return DptuneError(f"{future.state.name}: its worker was lost. Fix: start workers again, and run again.")
    try:
        found = future.state.result(raise_on_failure=False)
    except Exception as error:
        return error
    return found if isinstance(found, BaseException) else RuntimeError(str(future.state.message))
