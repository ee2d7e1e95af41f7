"""Serves the user interfaces to this user only: Prefect's UI and scheduler, the deployments, and MLflow's UI.

    python -m flows.ui        # `make ui`; Ctrl-C stops all of it

Both ask for a password, which is new at each start. It is in data/ui.env, mode 0600, while they run.

Set PREFECT_API_URL to use a Prefect server of your own, MLFLOW_TRACKING_URI for an MLflow server of your own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import Annotated, Literal

import typer

from dptune.core.errors import DptuneError
from dptune.core.files import write_text
from flows.common.child import child
from flows.server import HOST, USER, listens, new_password, prefect_settings
from tasks.mlflow.experiments import remembered, repair_paths
from tasks.paths import DATA
from tasks.stage import run_command

PREFECT_PORT = int(os.environ.get("DPTUNE_PREFECT_PORT", "4200"))
MLFLOW_PORT = int(os.environ.get("DPTUNE_MLFLOW_PORT", "5000"))
#: Holds the password while the servers run; `. data/ui.env` lets Prefect's commands ask the server.
PASSWORD_FILE = DATA / "ui.env"
#: Prefect's pages in the browser.
_PAGE_SETTINGS = {
    # Otherwise they ask the port of Prefect's own settings, whichever one the server has.
    "PREFECT_SERVER_UI_API_URL": "/api",
    # The second version of the pages asks a host of others for its configuration, before it reads any setting.
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
}
_START_SECONDS = 180


def run_ui() -> None:
    """Start the servers and the deployments; stop all of them when one ends or on Ctrl-C."""
    environment, password, url = dict(os.environ), new_password(), f"http://{HOST}:{PREFECT_PORT}"
    own_mlflow, own_prefect = ("MLFLOW_TRACKING_URI" not in environment, "PREFECT_API_URL" not in environment)
    access: dict[str, str] = {}
    if own_mlflow:
        _check_free(MLFLOW_PORT, "DPTUNE_MLFLOW_PORT")
        access |= zip(("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"), password.split(":"), strict=True)
    if own_prefect:
        _check_free(PREFECT_PORT, "DPTUNE_PREFECT_PORT")
        access |= {"PREFECT_API_URL": f"{url}/api", "PREFECT_API_AUTH_STRING": password}
    # Clients' settings, for this user's shell.
    write_text(PASSWORD_FILE, "".join(f"export {name}={value}\n" for name, value in access.items()))
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # It starts while Prefect does.
        mlflow = _start_mlflow({**environment, **access}, processes) if own_mlflow else None
        if own_prefect:
            settings = {**environment, **prefect_settings(password), **_PAGE_SETTINGS}
            processes.append(_start(_uvicorn("prefect_app", PREFECT_PORT), settings))
        prefect = processes[-1] if own_prefect else None
        if mlflow:
            _wait_for(MLFLOW_PORT, mlflow)
            if shown := remembered():
                print(f"The last run's cells in a table:  {shown.table}", flush=True)
                print(f"  the same in charts:             {shown.charts}", flush=True)
            print(f"MLflow UI:   http://{HOST}:{MLFLOW_PORT}", flush=True)
        if prefect:
            _wait_for(PREFECT_PORT, prefect)
            print(f"Prefect UI:  {url}   (Deployments -> study -> Run, or add a schedule)", flush=True)
        processes.append(_start(["flows.ui", "deployments"], {**environment, **access}))
        if own_mlflow or own_prefect:
            # A terminal alone shows it: other output may be kept.
            where = password if sys.stdout.isatty() else f"in {PASSWORD_FILE}"
            print(f"Sign in as {USER}:PASSWORD, which is {where}", flush=True)
            print(f"  (Prefect takes all of it, MLflow {USER} and what follows the colon)", flush=True)
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
        raise DptuneError("one of the servers ended by itself. Fix: look at its output above.")
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
    finally:
        _stop(processes)
        PASSWORD_FILE.unlink(missing_ok=True)
    print(
        "stopped. `make ui` starts all of it again; a study that was under way goes on when it is run again.",
        flush=True,
    )


def _start_mlflow(environment: dict[str, str], processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    repair_paths()
    # Job runners are off: they judge traces of language models, of which dptune writes none.
    plain = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
    processes.append(_start(_uvicorn("mlflow_app", MLFLOW_PORT), plain))
    return processes[-1]


def _uvicorn(app: str, port: int) -> list[str]:
    where = ["--host", HOST, "--port", str(port), "--log-level", "warning"]
    return ["uvicorn", "--factory", f"flows.server:{app}", *where]


def _start(module: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    # A session of its own, so that a server's worker processes end with it; a child ends even if this one is killed.
    return subprocess.Popen(child(*module), env=environment, start_new_session=True)


def _check_free(port: int, variable: str) -> None:
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise DptuneError(f"port {port} is in use. Fix: stop what listens there, or set {variable}.")


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until this very process listens, and tell its password to no other one that took the port meanwhile."""
    for _ in range(2 * _START_SECONDS):
        if process.poll() is not None:
            raise DptuneError(f"the server for port {port} ended at once. Fix: free its port, or set another one.")
        if listens(process.pid, port):
            return
        time.sleep(0.5)
    raise DptuneError(f"no server at port {port} in {_START_SECONDS} s. Fix: look at its output above.")


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
