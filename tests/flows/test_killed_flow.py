"""Whole flows as users meet their worst days: one is killed without a word, two work on one data folder at once.

The folder's name has a space and what addresses take for signs of their own.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from running_flow import RunningFlow, charged
from tiny_pipeline import BUDGET, UNITS, built, cells, copied, prepare_environment, read_json

from dptune.privacy.calibration import sampling
from dptune.privacy.ledger_file import read_ledger

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
EVERY = 8  # steps between checkpoints
LONG: dict[str, Any] = {
    "training": {"epochs": 6, "checkpoint_every": EVERY, "evaluate_every": 1000},
    "experiment": {"mechanisms": ["static"], "epsilons": [BUDGET], "cells_per_device": 1},
}
#: A cell notices within half a second that its flow is gone; a quick machine makes 60 steps of this model meanwhile.
LONGER = LONG | {"training": LONG["training"] | {"epochs": 40}}


def steps(overrides: dict[str, Any]) -> int:
    """The steps of a cell."""
    return sampling(UNITS, 16, overrides["training"]["epochs"])[1]


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny pipeline, as the current directory."""
    directory = copied(built(tmp_path_factory), tmp_path / "per%20cent que?ry")
    prepare_environment(monkeypatch, directory)
    return directory


def assert_told(runs: int, said: list[str], folder: Path) -> None:
    """MLflow has so many runs, all ended well; fewer only where a warning names what a busy database did not take.

    It reads a copy with an address of its own in ``folder``. The database's address is relative, and MLflow keeps one
    connection for an address as long as a process lives: a second test would read the first one's database.
    """
    client = MlflowClient(f"sqlite:///{shutil.copy('data/mlflow.db', folder / 'copy.db')}")
    found = [run for one in client.search_experiments() for run in client.search_runs([one.experiment_id])]
    named = "\n".join([*(f"{run.info.run_name}: {run.info.status}" for run in found), *said])
    assert {run.info.status for run in found} == {"FINISHED"}, named
    assert len(found) == runs or any("MLflow did not take" in text for text in said), named


def test_after_a_kill_of_the_flow_nothing_is_left_and_the_next_one_goes_on(folder: Path, tmp_path: Path) -> None:
    (cell,), planned = cells(LONGER), steps(LONGER)
    flow = RunningFlow(folder)
    try:
        flow.wait_until(lambda: charged(cell) >= EVERY + 2)
        started = flow.children()
        assert any("uvicorn" in " ".join(one.cmdline()) for one in started), "Prefect's temporary server"
        assert flow.of(cell)
        flow.process.kill()
        assert psutil.wait_procs(started, timeout=120)[1] == []
    finally:
        flow.end()
    paid = charged(cell)
    assert EVERY + 2 <= paid < planned
    said = RunningFlow(folder).finish()
    contents, result = read_ledger(cell.directory / "ledger.jsonl"), read_json(cell.directory / "result.json")
    assert contents.complete
    assert contents.releases == planned
    assert planned - EVERY <= result["history"][-1]["step"] <= planned, "at most the steps since a checkpoint are lost"
    assert_told(2, [said], tmp_path)
    assert not any("%" in path.name or "?" in path.name for path in folder.iterdir()), "nothing beside the data"


def test_two_checkouts_with_one_data_folder_share_the_device_and_pay_once(folder: Path, tmp_path: Path) -> None:
    both = {**LONG, "experiment": LONG["experiment"] | {"mechanisms": ["static", "nonprivate"]}}
    named = {cell.mechanism: cell for cell in cells(both)}
    other = tmp_path / "other checkout"
    other.mkdir()
    (other / "data").symlink_to(folder / "data")
    shutil.copy("params.yaml", other)
    flows = [RunningFlow(folder), RunningFlow(other)]
    most = 0
    try:
        while any(flow.process.poll() is None for flow in flows):
            most = max(most, len({one for flow in flows for cell in named.values() if (one := flow.of(cell))}))
        said = [flow.finish() for flow in flows]
    finally:
        for flow in flows:
            flow.end()
    assert most == 1, "one place on the device"
    assert all("Traceback" not in text for text in said)
    contents = read_ledger(named["static"].directory / "ledger.jsonl")
    assert (contents.releases, contents.complete) == (steps(both), True), "paid once"
    assert_told(3, said, tmp_path)
