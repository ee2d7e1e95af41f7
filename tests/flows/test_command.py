"""The command of a flow: Ctrl-C ends it and all that it started at once, with what it came to on the last line."""

from __future__ import annotations

import ast
import inspect
import logging
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
import torch
from prefect import Flow
from tiny_pipeline import ROOT, UNITS, static

from dptune.privacy.calibration import sampling
from dptune.privacy.entropy import OsEntropy
from dptune.training.loop import train
from dptune.training.run import StepReport
from flows.audit import audit
from flows.common.command import CellError, FlowError, _Plain, flow_error
from flows.experiment import experiment
from flows.policy import policy
from flows.prediction import prediction
from flows.search import search
from flows.server import cancel_run
from flows.study import study
from tasks.experiment.cell_list import standing
from tasks.experiment.preparation import prepare, shared_inputs

pytestmark = pytest.mark.system

# A flow that hangs, in a thread too, beside a child that takes no hint.
HANGING = """
import subprocess, sys, threading
from flows.common.command import run_flow
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"

def work():
    child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    child.stdout.readline()
    thread = threading.Thread(target=child.wait)
    thread.start()
    print(child.pid, flush=True)
    try:
        thread.join()
    except BaseException:
        while True:  # as Prefect, which tells a server that is gone
            pass

run_flow(work, lambda: "at release 50 of 102")
"""


def test_ctrl_c_ends_a_flow_and_all_that_it_started(tmp_path: Path) -> None:
    """Its end is waited for, however long: only the test's own limit stops one that hangs."""
    # A server is named, so none is started.
    environment = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    flow = subprocess.Popen(
        [sys.executable, "-c", HANGING], stdout=-1, stderr=-1, text=True, cwd=tmp_path, env=environment
    )
    assert flow.stdout is not None
    child = psutil.Process(int(flow.stdout.readline()))
    flow.send_signal(signal.SIGINT)
    error = flow.communicate()[1]
    assert error.splitlines()[-1] == "stopped at release 50 of 102; run again to go on"
    assert flow.returncode == 130
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_prefect_is_told_that_a_run_was_cancelled(server: str) -> None:
    """As the handler of Ctrl-C tells it, in the midst of a flow; without a run it says nothing."""
    from prefect import flow, task
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.runtime import flow_run

    begun, ended = threading.Event(), threading.Event()

    @task
    def working() -> None:
        begun.set()
        ended.wait()

    @flow
    def stopped() -> list[Any]:
        future = working.submit()
        begun.wait()
        run = UUID(str(flow_run.id))
        own = FlowRunFilter(id=FlowRunFilterId(any_=[run]))
        with get_client(sync_client=True) as client:
            while not client.read_task_runs(flow_run_filter=own):
                pass  # Prefect hands states of tasks on in the background
            cancel_run()
            states = [client.read_flow_run(run).state, client.read_task_runs(flow_run_filter=own)[0].state]
        ended.set()
        future.wait()
        return [state.type.value for state in states if state]

    cancel_run()
    assert stopped() == ["CANCELLED", "CANCELLED"]


def test_how_far_cells_came_is_read_from_their_ledgers(pipeline: Path) -> None:
    cell = static()
    steps = sampling(UNITS, cell.training.expected_batch_size, cell.training.epochs)[1]
    assert standing([cell]) == "before the first release"
    cell.directory.mkdir(parents=True)
    entropy = OsEntropy()
    prepared = prepare(cell, shared_inputs(cell, torch.device("cpu")), entropy)

    class EnoughError(Exception):
        pass

    def stop(report: StepReport) -> None:
        if report.releases == 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        train(prepared.spec, cell.directory, entropy, stop)
    assert steps > 3
    assert standing([cell]) == f"at release 3 of {steps}"
    other = static({"training": {"epochs": 0.7}})
    assert standing([cell, other]) == f"at release 3 of {steps}, with 0 of 2 cells finished"


def test_the_first_parts_cause_is_said_whatever_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    killed, silent = CellError("a", -9, "a line"), CellError("b", 3, "")
    assert flow_error("1 of 2", [killed, silent]).cause.startswith("a was killed, which the system does when memory")
    assert flow_error("1 of 2", [silent, killed]).cause.startswith("b ended with status 3 and gave no reason. Fix: ")
    mended = CellError("c", 2, "a line\nerror: x: is wrong. Fix: mend it.\na farewell")
    found = flow_error("1 of 2", [mended])
    assert (found.cause, found.status, str(found)) == ("x: is wrong. Fix: mend it.", 2, "1 of 2")
    assert flow_error("2 of 2", [mended, killed]).status == 1
    again = pickle.loads(pickle.dumps(found))
    assert isinstance(again, FlowError)
    assert (again.summary, again.cause, again.status) == (found.summary, found.cause, found.status)


def test_prefects_lines_lose_their_tracebacks() -> None:
    """An unforeseen error's sentence may quote a record; its traceback is kept for the owner alone."""
    error = KeyError("a patient")
    record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 1, "failed", None, (KeyError, error, None))
    assert _Plain().filter(record)
    assert record.exc_info is None
    assert "patient" not in logging.Formatter().format(record)


def test_a_flow_that_make_did_not_start_sends_no_telemetry_either(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PREFECT_SERVER_ANALYTICS_ENABLED", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    code = "import flows, prefect.settings; print(prefect.settings.PREFECT_SERVER_ANALYTICS_ENABLED.value())"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


@pytest.mark.parametrize("flow", [audit, experiment, policy, prediction, search, study])
def test_every_flow_begins_so_that_sigterm_ends_it(flow: Flow[..., Any]) -> None:
    """Prefect's own handler waits for the cells, and starts them again."""
    (function,) = ast.parse(inspect.getsource(flow.fn)).body
    assert isinstance(function, ast.FunctionDef)
    assert ast.unparse(function.body[1]) == "begin_flow()", "after the docstring"
