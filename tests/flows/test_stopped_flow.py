"""SIGTERM to a flow, or to its process group, in the midst of its cells: as batch systems and containers send it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from running_flow import RunningFlow, charged
from tiny_pipeline import BUDGET, ROOT, UNITS, cells, read_json

from dptune.privacy.calibration import sampling
from dptune.privacy.ledger_file import read_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

# A flow within a flow, with a cell that ends after its step.
NESTED = """
import flows  # before Prefect, which reads the limits of its server once
from prefect import flow, task
from flows.common.child import child
from flows.common.command import begin_flow, run_flow
from flows.common.runners import run_process

@task(retries=1, retry_delay_seconds=2)
def cell():
    run_process("cell", child("stepping"))

@flow
def cells():
    begin_flow()
    cell.submit().wait()

@flow
def study():
    begin_flow()
    cells()

run_flow(study, lambda: "at release 3 of 9")
"""
STEPPING = """
import os, sys, time
from dptune.core.interrupts import stop_request
if os.path.exists("begun"):
    time.sleep(20)
    open("second attempt", "w").close()
    sys.exit()
with stop_request() as asked:
    open("begun", "w").close()
    ends = time.monotonic() + 240
    while not asked() and time.monotonic() < ends:
        time.sleep(0.1)
    if asked():
        open("checkpoint", "w").close()
"""


def states(home: Path) -> dict[str, set[str]]:
    """Names of the states of all flow runs and task runs in Prefect's database."""
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        return {
            kind: {state for (state,) in database.execute(f"SELECT state_type FROM {kind}")}
            for kind in ("flow_run", "task_run")
        }


@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_sigterm_ends_flows_within_flows_and_all_that_they_started(send: Any, tmp_path: Path) -> None:
    """Their end is waited for, however long. Prefect's own handler waits for the cells, and tries them once more.

    A cell that ended early is none that ended well: Prefect would keep its result, and the next run leave it out.
    """
    (tmp_path / "stepping.py").write_text(STEPPING)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PREFECT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", NESTED]
    flow = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, start_new_session=True
    )
    while not (tmp_path / "begun").exists():
        assert flow.poll() is None, flow.communicate()[1]
    started = psutil.Process(flow.pid).children(recursive=True)
    assert any("uvicorn" in one.cmdline() for one in started), "Prefect's temporary server"
    send(flow.pid, signal.SIGTERM)
    error = flow.communicate()[1]
    assert error.splitlines()[-1] == "stopped at release 3 of 9; run again to go on"
    assert flow.returncode == 130
    assert psutil.wait_procs(started, timeout=240)[1] == []
    assert (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "second attempt").exists()
    assert states(tmp_path / "home") == {"flow_run": {"CANCELLED"}, "task_run": {"CANCELLED"}}


#: Without a checkpoint on the way: one that is there was written because of the signal.
SLOW: dict[str, Any] = {
    "training": {"epochs": 6, "checkpoint_every": 1000, "evaluate_every": 1000},
    "experiment": {"mechanisms": ["static"], "epsilons": [BUDGET], "retries": 1},
}


def test_after_sigterm_in_a_cell_the_next_command_goes_on(pipeline: Path) -> None:
    (cell,) = cells(SLOW)
    steps = sampling(UNITS, 16, SLOW["training"]["epochs"])[1]
    flow = RunningFlow(pipeline)
    try:
        flow.wait_until(lambda: charged(cell) >= 3)
        os.killpg(flow.process.pid, signal.SIGTERM)
        flow.process.wait()
    finally:
        flow.end()
    at_stop = charged(cell)
    assert 3 <= at_stop < steps
    assert flow.log.read_text().splitlines()[-1] == f"stopped at release {at_stop} of {steps}; run again to go on"
    assert (cell.directory / "checkpoint.safetensors").exists()
    RunningFlow(pipeline).finish()
    assert read_ledger(cell.directory / "ledger.jsonl").releases == steps
    assert read_json(cell.directory / "result.json")["history"][-1]["step"] == steps, "no step that was paid is lost"
