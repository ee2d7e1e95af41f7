"""``python -m flows.ui``: both servers and a deployment that runs what is scheduled, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil
import pytest
from safetensors import safe_open
from tiny_pipeline import read_json, write_params

from dptune.privacy.ledger_file import read_ledger
from tasks import tracking
from tasks.paths import EXPERIMENT, REPORTS, RUNS

pytestmark = pytest.mark.system


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", port)) == 0


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST with a body; parsed JSON, else text."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            with urlopen(Request(url, data, {"Content-Type": "application/json"})) as answer:
                text = answer.read().decode()
            try:
                return json.loads(text)
            except ValueError:
                return text
        except HTTPError as error:
            if error.code != 503:  # the server's SQLite is busy: ask again, as Prefect's own client does
                raise
            time.sleep(0.5)


def wait_for(check: Any) -> Any:
    """The first true answer, however long it takes: only the test's own limit ends a wait for what never comes."""
    while True:
        with suppress(URLError, OSError):
            if found := check():
                return found
        time.sleep(0.5)


class Interface:
    """A running ``make ui``."""

    def __init__(self, directory: Path) -> None:
        self.prefect, self.mlflow = free_port(), free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {
            "DPTUNE_PREFECT_PORT": str(self.prefect),
            "DPTUNE_MLFLOW_PORT": str(self.mlflow),
            "PREFECT_HOME": str(directory / "data" / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",  # seconds; ten would only be waited for
        }
        self.log = directory / "ui.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.ui"], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.api = f"http://127.0.0.1:{self.prefect}/api"
        self.seen: dict[int, psutil.Process] = {}

    def note(self) -> None:
        """Remember every process that belongs to it now."""
        for one in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[one.pid] = one

    def left(self) -> list[str]:
        """Which of those still run."""
        return [str(one) for one in self.seen.values() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        """Whatever a failed test left."""
        for one in [*self.seen.values(), psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            if one.is_running():
                one.kill()
        self.process.wait()
        for one in self.seen.values():
            if one.is_running():
                one.kill()


@pytest.fixture
def interface(pipeline: Path) -> Iterator[Interface]:
    write_params({"experiment": {"mechanisms": ["static"]}})
    running = Interface(pipeline)
    try:
        yield running
    finally:
        running.end()


@pytest.mark.timeout(3600)
def test_a_scheduled_deployment_runs_to_its_end_and_everything_stops(interface: Interface) -> None:
    def deployment() -> Any:
        assert interface.process.poll() is None, interface.log.read_text()
        interface.note()
        return ask(f"{interface.api}/deployments/name/experiment/experiment")

    found = wait_for(deployment)
    assert {"epsilons", "mechanisms", "seeds", "overrides"} <= set(found["parameter_openapi_schema"]["properties"])
    at = (datetime.now(UTC) + timedelta(seconds=5)).isoformat()
    state = {"type": "SCHEDULED", "state_details": {"scheduled_time": at}}
    body = {"parameters": {"epsilons": [4]}, "state": state}
    run = ask(f"{interface.api}/deployments/{found['id']}/create_flow_run", body)

    def ended() -> Any:
        assert interface.process.poll() is None, interface.log.read_text()
        interface.note()
        now = ask(f"{interface.api}/flow_runs/{run['id']}")
        return now if now["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None

    assert run["state_type"] == "SCHEDULED", "it waits for its time"
    state_type = wait_for(ended)["state_type"]
    assert state_type == "COMPLETED", interface.log.read_text()
    assert ask(f"http://127.0.0.1:{interface.mlflow}/health") == "OK"
    assert not EXPERIMENT.exists(), "the list of params.yaml's own cells"
    (own,) = REPORTS.iterdir()
    (name,) = read_json(own / EXPERIMENT.name)["cells"]
    assert name.startswith("small.static.eps4.seed0-")
    assert read_json(RUNS / name / "result.json")["epsilon_certified"] <= 4
    assert read_ledger(RUNS / name / "ledger.jsonl").complete
    page = f"http://127.0.0.1:{interface.mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name=tiny"
    assert ask(page)["experiment"]["name"] == "tiny"
    parent = tracking.client().get_run(tracking.parent_run("tiny", {}))
    assert parent.data.tags["prefect_flow_run"] == run["id"]
    assert parent.info.status == "FINISHED"
    interface.note()
    assert len(interface.seen) >= 3
    interface.process.send_signal(signal.SIGTERM)
    assert interface.process.wait() == 0, interface.log.read_text()
    ending = interface.log.read_text().rpartition("\nstopping\n")[2]
    assert re.fullmatch(r"stopped\. `make ui` starts .*\n", ending), "a sentence, where 40 lines of tracebacks were"
    wait_for(lambda: not interface.left())
    assert not listening(interface.prefect)
    assert not listening(interface.mlflow)


def trains_cells(process: psutil.Process) -> bool:
    """Whether a process is a cell's, and runs; one that ended and that nobody waited for has no command line."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and "tasks.experiment.finetune" in process.cmdline()
    return False


def belongs_to_a_run(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool({"flows.child", "prefect.engine"} & {*process.cmdline()})
    return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_cancelled_run_ends_its_cells_with_a_checkpoint_and_goes_on(interface: Interface) -> None:
    """A run of 3000 epochs would take hours."""

    def deployment() -> Any:
        assert interface.process.poll() is None, interface.log.read_text()
        return ask(f"{interface.api}/deployments/name/experiment/experiment")

    def start() -> Any:
        body = {"parameters": {"epochs": 3000.0}, "state": {"type": "SCHEDULED"}}
        return ask(f"{interface.api}/deployments/{found['id']}/create_flow_run", body)

    def releases() -> int:
        return sum(path.read_text().count('"kind":"release"') for path in RUNS.glob("*/ledger.jsonl"))

    def cells() -> list[psutil.Process]:
        interface.note()
        return [one for one in interface.seen.values() if trains_cells(one)]

    found = wait_for(deployment)
    run = start()
    wait_for(lambda: releases() > 3)
    assert len(cells()) == 1
    ask(f"{interface.api}/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    wait_for(lambda: not cells())
    wait_for(lambda: ask(f"{interface.api}/flow_runs/{run['id']}")["state_type"] == "CANCELLED")
    paid = releases()
    (checkpoint,) = RUNS.glob("*/checkpoint.safetensors")
    with safe_open(checkpoint, "np") as file:
        progress = json.loads(file.metadata()["progress"])
    assert progress["releases"] == progress["step"] == paid, "nothing that was paid for is lost"
    start()
    wait_for(lambda: releases() > paid)
    assert len(list(RUNS.glob("*/ledger.jsonl"))) == 1, "the same run goes on"
    assert len(cells()) == 1
    of_the_run = [one for one in interface.seen.values() if one.is_running() and belongs_to_a_run(one)]
    assert len(of_the_run) >= 5, "two servers, what serves the deployments, the run, its cell"
    interface.process.kill()  # as where memory is short: nothing is told to anything
    started = time.monotonic()
    psutil.wait_procs(of_the_run, timeout=600)
    print(f"ended {time.monotonic() - started:.1f} s after the kill")
    assert [one for one in of_the_run if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []
    assert not listening(interface.prefect)
    assert not listening(interface.mlflow)


class Other(BaseHTTPRequestHandler):
    """Some other server, which answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_a_port_in_use_is_a_message(pipeline: Path) -> None:
    write_params()
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {
            "DPTUNE_PREFECT_PORT": str(other.server_port),
            "DPTUNE_MLFLOW_PORT": str(free_port()),
            "PREFECT_HOME": str(pipeline / "data" / "prefect"),
        }
        command = [sys.executable, "-m", "flows.ui"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        other.shutdown()
    assert ended.returncode == 2, ended.stdout + ended.stderr
    last = ended.stderr.split("error: ")[-1]
    assert "port" in last
    assert "Traceback" not in last
