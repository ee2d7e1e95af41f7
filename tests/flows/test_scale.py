"""Clusters of real worker processes on this machine, a worker killed among them: ``make check-scale``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running_flow import RunningFlow, charged
from tiny_pipeline import BUDGET, UNITS, cells, read_json, write_params

from dptune.core.files import write_text
from dptune.job.search.plan import Plan
from dptune.job.search.search import working_folder
from dptune.privacy.calibration import sampling
from dptune.privacy.certificate import FILE, read_certificate
from dptune.privacy.ledger_file import read_ledger
from tasks.experiment.cells import Cell
from tasks.mlflow import tracking
from tasks.paths import SEARCH

pytestmark = [pytest.mark.scale, pytest.mark.timeout(1800)]

CHECKPOINT_EVERY = 3
LONG = {
    "training": {"epochs": 40, "checkpoint_every": CHECKPOINT_EVERY, "evaluate_every": 50},
    "experiment": {"mechanisms": ["static"], "epsilons": [BUDGET], "seeds": [0, 1]},
}


@pytest.fixture
def start(pipeline: Path) -> Iterator[Callable[..., RunningFlow]]:
    flows: list[RunningFlow] = []

    def started(module: str = "flows.experiment") -> RunningFlow:
        flows.append(RunningFlow(pipeline, module))
        return flows[-1]

    yield started
    for flow in flows:
        flow.end()


def checkpoint(cell: Cell) -> Path:
    return cell.directory / "checkpoint.safetensors"


def first_line(cell: Cell) -> Any:
    return json.loads((cell.directory / "ledger.jsonl").read_text().splitlines()[0])


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def verified(cell: Cell) -> None:
    command = [sys.executable, "-m", "dptune", "verify", "--no-guarantee", str(cell.directory / "ledger.jsonl")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_a_cluster_of_this_machine_runs_every_cell(runner: str, start: Callable[..., RunningFlow]) -> None:
    grid = cells({"experiment": {"runner": runner, "cells_per_device": 2}})
    output = start().finish()
    assert "2 of 2 cells" in output
    for cell in grid:
        verified(cell)
        assert read_ledger(cell.directory / "ledger.jsonl").complete
        assert "result.json" in {path.name for path in cell.directory.iterdir()}
    found = {path: oct(path.stat().st_mode) for path in Path("data/runs").rglob("*") if path.stat().st_mode & 0o077}
    assert found == {}
    again = start().finish()  # what is done is not done again
    assert again.count("releases") == 0


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_the_cell_of_a_killed_worker_goes_on_from_its_checkpoint(
    runner: str, start: Callable[..., RunningFlow]
) -> None:
    """Two workers with a cell each; no retry of Prefect's, so that the cluster alone hands the cell on."""
    victim, other = cells(LONG, {"experiment": {"runner": runner, "cells_per_device": 2, "retries": 0}})
    steps = sampling(UNITS, 16, LONG["training"]["epochs"])[1]
    flow = start()
    flow.wait_until(lambda: charged(victim) >= 30 and checkpoint(victim).exists())
    process = flow.of(victim)
    assert process is not None
    worker = process.parent()
    assert worker is not None
    assert worker.pid != flow.process.pid
    before, run = first_line(victim), (victim.directory / "mlflow_run").read_text()
    worker.send_signal(signal.SIGKILL)
    flow.wait_until(lambda: gone(process))  # it ends with its worker, before another one takes its cell
    at_kill = charged(victim)
    kept = (victim.directory / "ledger.jsonl").read_bytes().splitlines()[: at_kill + 1]
    assert at_kill < steps, "it was killed too late to show anything"
    assert not (victim.directory / "result.json").exists()
    output = flow.finish()

    assert "2 of 2 cells" in output
    assert first_line(victim)["run_id"] == before["run_id"]
    assert (victim.directory / "ledger.jsonl").read_bytes().splitlines()[: at_kill + 1] == kept
    for cell in (victim, other):
        verified(cell)
        contents, result = read_ledger(cell.directory / "ledger.jsonl"), read_json(cell.directory / "result.json")
        assert contents.complete
        assert contents.releases == result["releases"] == steps
        assert result["epsilon_certified"] == contents.epsilons.certified <= BUDGET
        assert not checkpoint(cell).exists()
    # From the start, it would have lost every step that was charged; from its checkpoint, those since then.
    lost = steps - read_json(victim.directory / "result.json")["history"][-1]["step"]
    assert 0 <= lost <= CHECKPOINT_EVERY < at_kill
    assert read_json(other.directory / "result.json")["history"][-1]["step"] == steps
    assert (victim.directory / "mlflow_run").read_text() == run
    assert tracking.client().get_run(run).info.status == "FINISHED"
    logged = {metric.step for metric in tracking.client().get_metric_history(run, "training/noise_multiplier")}
    assert max(logged) == steps - lost


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_the_search_of_a_killed_worker_goes_on_with_the_same_plan(
    runner: str, start: Callable[..., RunningFlow]
) -> None:
    """A search is one task of the cluster; the process of a second worker goes on with the candidates of the first."""
    for name, text in (("__main__", ""), ("__init__", "")):  # the data is there
        write_text(Path("dvc") / f"{name}.py", text)
    space = {"learning_rate": {"log_uniform": [0.001, 0.02]}}
    asked = {
        "name": "tiny",
        "epsilon": BUDGET,
        "candidates": 3,
        "space": space,
        "bound": "one_shift",
        "keep_losers": True,
    }
    write_params(LONG, {"experiment": {"runner": runner, "telemetry": "private"}, "search": asked})
    working = working_folder(SEARCH / "tiny")
    flow = start("flows.search")
    flow.wait_until(lambda: any(len(one.read_bytes()) > 3000 for one in working.glob("candidates/*/ledger.jsonl")))
    process = flow.child_with("tasks.search.run")
    assert process is not None
    worker = process.parent()
    assert worker is not None
    assert worker.pid != flow.process.pid
    plan = Plan.read(working)
    kept = {one: one.read_bytes() for one in working.glob("candidates/*/ledger.jsonl")}
    worker.send_signal(signal.SIGKILL)
    output = flow.finish()

    assert gone(process)
    assert "for the whole search" in output
    assert Plan.read(working) == plan
    for ledger, lines in kept.items():
        assert ledger.read_bytes().startswith(lines[: lines.rindex(b"\n") + 1])
    command = [sys.executable, "-m", "dptune.cli", "verify", str(SEARCH / "tiny" / "adapter")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert read_certificate(SEARCH / "tiny" / "adapter" / FILE).certified <= BUDGET
