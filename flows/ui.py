"""Serves the user interfaces to this machine only: Prefect's UI and scheduler, the deployments, and MLflow's UI.

    python -m flows.ui        # `make ui`; Ctrl-C stops all of it

Set PREFECT_API_URL to use a Prefect server of your own, MLFLOW_TRACKING_URI for an MLflow server of your own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from types import FrameType
from typing import Annotated, Literal
from urllib.error import URLError
from urllib.request import urlopen

import typer

from dptune.errors import DptuneError
from flows.child import child
from tasks.page_links import remembered
from tasks.stage import run_command
from tasks.tracking import tracking_uri

HOST = "127.0.0.1"
PREFECT_PORT = int(os.environ.get("DPTUNE_PREFECT_PORT", "4200"))
MLFLOW_PORT = int(os.environ.get("DPTUNE_MLFLOW_PORT", "5000"))
_START_SECONDS = 180


def run_ui() -> None:
    """Start the servers and the deployments; stop all of them when one ends or on Ctrl-C."""
    environment = dict(os.environ)
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        own_mlflow, own_prefect = ("MLFLOW_TRACKING_URI" not in environment, "PREFECT_API_URL" not in environment)
        mlflow = _start_mlflow(environment, processes) if own_mlflow else None  # it starts while Prefect does
        if own_prefect:
            _check_free(PREFECT_PORT, "DPTUNE_PREFECT_PORT")
            url = f"http://{HOST}:{PREFECT_PORT}"
            environment["PREFECT_API_URL"] = f"{url}/api"
            server = ["prefect", "server", "start", "--host", HOST, "--port", str(PREFECT_PORT)]
            processes.append(_start(server, {**os.environ, **_page_settings(url)}))
            _wait_for(f"{url}/api/health", processes[-1])
            print(f"Prefect UI:  {url}   (Deployments -> study -> Run, or add a schedule)", flush=True)
        processes.append(_start(["flows.ui", "deployments"], environment))
        if mlflow:
            _wait_for(f"http://{HOST}:{MLFLOW_PORT}/health", mlflow)
            print(f"MLflow UI:   http://{HOST}:{MLFLOW_PORT}", flush=True)
            if shown := remembered():
                print(f"  the last run's cells in a table:  {shown.table}", flush=True)
                print(f"  the same in charts:               {shown.charts}", flush=True)
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
        raise DptuneError("one of the servers ended by itself. Fix: look at its output above.")
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
    finally:
        _stop(processes)
    print(
        "stopped. `make ui` starts all of it again; a study that was under way goes on when it is run again.",
        flush=True,
    )


def _page_settings(url: str) -> dict[str, str]:
    """Settings of Prefect's pages in the browser."""
    return {
        # Otherwise they ask the port of Prefect's own settings, whichever one the server has.
        "PREFECT_SERVER_UI_API_URL": f"{url}/api",
        # The second version of the pages asks a host of others for its configuration, before it reads any setting.
        "PREFECT_SERVER_UI_V2_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


def _start_mlflow(environment: dict[str, str], processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    _check_free(MLFLOW_PORT, "DPTUNE_MLFLOW_PORT")
    store = ["--backend-store-uri", tracking_uri(), "--workers", "1", "--uvicorn-opts", "--log-level warning"]
    # Job runners are off: they judge traces of language models, of which dptune writes none.
    plain = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
    processes.append(_start(["mlflow", "server", "--host", HOST, "--port", str(MLFLOW_PORT), *store], plain))
    return processes[-1]


def _start(module: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    # A session of its own, so that a server's worker processes end with it; a child ends even if this one is killed.
    return subprocess.Popen(child(*module), env=environment, start_new_session=True)


def _check_free(port: int, variable: str) -> None:
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise DptuneError(f"port {port} is in use. Fix: stop what listens there, or set {variable}.")


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(_START_SECONDS):
        if process.poll() is not None:
            raise DptuneError(f"the server for {url} ended at once. Fix: free its port, or set another one.")
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(1)
    raise DptuneError(f"no answer from {url} in {_START_SECONDS} s. Fix: look at its output above.")


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        try:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=15)
        except ProcessLookupError:
            continue
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(
    only: Annotated[Literal["deployments"] | None, typer.Argument(help="serve the deployments without any UI")] = None,
) -> None:
    """Serve Prefect's and MLflow's UI, and the deployments."""
    if only:
        from flows.deployments import serve_deployments

        serve_deployments()
    else:
        run_ui()


if __name__ == "__main__":
    run_command(main)
