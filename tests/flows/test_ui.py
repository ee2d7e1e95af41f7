"""``python -m flows.ui``: both servers and a deployment that runs what is scheduled, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest
from running_ui import RunningUi, free_port, listening, without_dvc
from safetensors import safe_open
from tiny_pipeline import BUDGET, QUICK_AUDIT, read_json, write_params

from dptune.core.files import write_text
from dptune.privacy.ledger_file import read_ledger
from tasks.mlflow import tracking
from tasks.paths import EXPERIMENT, REPORT, RUNS

pytestmark = pytest.mark.system
PAGE = REPORT / "report.html"


@pytest.fixture
def interface(pipeline: Path) -> Iterator[RunningUi]:
    write_params({"experiment": {"mechanisms": ["static"]}, "audit": QUICK_AUDIT})
    without_dvc()
    running = RunningUi(pipeline)
    try:
        yield running
    finally:
        running.end()


def prefect(running: RunningUi, *arguments: str) -> str:
    """What a command of Prefect's prints that asks this server."""
    command = [sys.executable, "-m", "prefect", *arguments]
    ended = subprocess.run(command, env=running.client_environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.timeout(3600)
def test_a_cron_from_the_command_runs_the_study_and_everything_stops(interface: RunningUi, pipeline: Path) -> None:
    """The whole way: Prefect's own scheduler makes the run, and what it leaves is a new report."""
    found = interface.deployment("study")
    interface.note()
    assert {"epsilons", "mechanisms", "seeds", "overrides"} <= set(found["parameter_openapi_schema"]["properties"])
    write_text(PAGE, "of yesterday")
    prefect(interface, "deployment", "schedule", "create", "study/study", "--cron", "* * * * *")
    run = interface.scheduled_run(found)
    assert run["state_type"] == "COMPLETED", interface.log.read_text()
    assert "<title>dptune report: tiny</title>" in PAGE.read_text(), "the file's own values, so the workspace's report"
    (name,) = read_json(EXPERIMENT)["cells"]
    assert name.startswith(f"small.static.eps{BUDGET:g}.seed0-")
    assert read_json(RUNS / name / "result.json")["epsilon_certified"] <= BUDGET
    assert read_ledger(RUNS / name / "ledger.jsonl").complete
    page = f"{interface.mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name=tiny"
    with urlopen(Request(page, headers={"Authorization": interface.basic})) as answer:
        assert json.load(answer)["experiment"]["name"] == "tiny"
    assert tracking.client().get_run(tracking.parent_run("tiny", {})).info.status == "FINISHED"
    write_params({"experiment": {"name": "changed", "mechanisms": ["static"]}, "audit": QUICK_AUDIT})
    interface.wait_for(lambda: interface.deployment("study")["parameters"]["name"] == "changed")
    assert schedules(interface) == [("* * * * *", True)], "a change of params.yaml leaves it alone"
    interface.note()
    assert len(interface.seen) >= 3
    registered = interface.deployment("study")["updated"]
    assert interface.stop() == 0, interface.log.read_text()
    ending = interface.log.read_text().rpartition("\nstopping\n")[2]
    assert re.fullmatch(r"stopped\. `make ui` starts .*\n", ending), "a sentence, where 40 lines of tracebacks were"
    while interface.left():
        time.sleep(0.5)
    assert not interface.password_file.exists()
    assert not listening(interface.prefect)
    assert not listening(interface.mlflow)
    again = RunningUi(pipeline)
    try:
        again.wait_for(lambda: again.deployment("study")["updated"] > registered)
        assert schedules(again) == [("* * * * *", True)], "and so does another start"
    finally:
        again.end()


def schedules(running: RunningUi) -> list[tuple[str, bool]]:
    """Cron and whether it is active, of each schedule of the study."""
    return [(one["schedule"]["cron"], one["active"]) for one in running.deployment("study")["schedules"]]


def trains_cells(process: psutil.Process) -> bool:
    """Whether a process is a cell's, and runs; one that ended and that nobody waited for has no command line."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and "tasks.experiment.finetune" in process.cmdline()
    return False


def belongs_to_a_run(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool({"flows.common.child", "prefect.engine"} & {*process.cmdline()})
    return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_cancelled_run_ends_its_cells_with_a_checkpoint_and_goes_on(interface: RunningUi) -> None:
    """A run of 3000 epochs would take hours."""

    def start() -> str:
        body = {"parameters": {"epochs": 3000.0}, "state": {"type": "SCHEDULED"}}
        return str(interface.ask(f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def releases() -> int:
        return sum(path.read_text().count('"kind":"release"') for path in RUNS.glob("*/ledger.jsonl"))

    def cells() -> list[psutil.Process]:
        interface.note()
        return [one for one in interface.seen.values() if trains_cells(one)]

    found = interface.deployment("experiment")
    run = start()
    interface.wait_for(lambda: releases() > 3)
    assert len(cells()) == 1
    interface.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    interface.wait_for(lambda: not cells())
    assert interface.ended(run)["state_type"] == "CANCELLED"
    paid = releases()
    (checkpoint,) = RUNS.glob("*/checkpoint.safetensors")
    with safe_open(checkpoint, "np") as file:
        progress = json.loads(file.metadata()["progress"])
    assert progress["releases"] == progress["step"] == paid, "nothing that was paid for is lost"
    start()
    interface.wait_for(lambda: releases() > paid)
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
