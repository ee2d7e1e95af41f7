"""Prefect's task runner that ``experiment.runner`` names, and so where a flow's cells run.

threads              the flow's process starts every cell on its own machine
dask, ray            a temporary cluster of this machine, which ends with the flow
tcp://host:8786      a running Dask scheduler (tls:// too)
ray://host:10001     a running Ray cluster
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from dptune.errors import ConfigError
from tasks.settings.experiment import Experiment

THREADS = "threads"


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
