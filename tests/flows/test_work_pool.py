"""A run in a work pool, as docs/howto/cluster.md starts it: Suspend ends its cell, Resume goes on, Cancel ends it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from running_ui import RunningUi, without_dvc
from tiny_pipeline import ROOT, write_params

from tasks.paths import RUNS

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
#: What *Suspend* on a run's page does.
SUSPEND = "import sys; from prefect.flow_runs import suspend_flow_run; suspend_flow_run(flow_run_id=sys.argv[1])"


class Pool:
    """A work pool of processes, with one worker, beside a running ``make ui``."""

    def __init__(self, served: RunningUi, directory: Path) -> None:
        served.wait_for(served.password_file.exists)
        served.deployment("experiment")
        self.served, self.log = served, directory / "worker.log"
        self.environment = {**served.client_environment, "PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "1"}
        self.prefect("work-pool", "create", "--type", "process", "dptune")
        flow = ("flows/experiment.py:experiment", "--name", "pool", "--pool", "dptune")
        self.prefect("--no-prompt", "deploy", *flow)
        with self.log.open("ab") as log:
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "prefect", "worker", "start", "--pool", "dptune", "--limit", "1"],
                env=self.environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def prefect(self, *words: str) -> None:
        said = subprocess.run(
            [sys.executable, "-m", "prefect", *words], env=self.environment, capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stdout + said.stderr

    def suspend(self, run: str) -> None:
        subprocess.run([sys.executable, "-c", SUSPEND, run], env=self.environment, check=True)

    def state(self, run: str) -> str:
        return str(self.served.ask(f"/flow_runs/{run}")["state_type"])

    def cells(self) -> bool:
        """Whether a process of a cell runs."""
        with suppress(psutil.Error):
            found = psutil.Process(self.worker.pid).children(recursive=True)
            return any("tasks.experiment.finetune" in one.cmdline() for one in found)
        return True  # one ended meanwhile: look again

    def end(self) -> None:
        """End the worker and all that it started."""
        with suppress(psutil.Error):
            for one in [*psutil.Process(self.worker.pid).children(recursive=True), self.worker]:
                one.kill()
        self.worker.wait()


@pytest.fixture
def pool(pipeline: Path) -> Iterator[Pool]:
    write_params()
    without_dvc()
    (pipeline / "flows").symlink_to(ROOT / "flows")
    served = RunningUi(pipeline)
    try:
        one = Pool(served, pipeline)
        try:
            yield one
        finally:
            one.end()
        served.stop()
    finally:
        served.end()


def releases() -> int:
    """How many releases all cells made."""
    return sum(one.read_text().count('"release"') for one in RUNS.glob("*/ledger.jsonl"))


def test_suspend_ends_the_cell_of_a_run_in_a_pool_resume_lets_it_go_on_and_cancel_ends_it(pool: Pool) -> None:
    served = pool.served
    deployment = served.wait_for(lambda: served.ask("/deployments/name/experiment/pool"))
    long = {"mechanisms": ["static"], "overrides": {"training": {"epochs": 3000.0}}}
    run = str(served.ask(f"/deployments/{deployment['id']}/create_flow_run", {"parameters": long})["id"])
    try:
        served.wait_for(lambda: releases() > 0)
        pool.suspend(run)
        served.wait_for(lambda: not pool.cells(), 60)
        stopped = releases()
        assert len(list(RUNS.glob("*/checkpoint.safetensors"))) == 1
        time.sleep(5)
        assert (pool.state(run), releases()) == ("PAUSED", stopped)
        served.ask(f"/flow_runs/{run}/resume", {})
        served.wait_for(lambda: releases() > stopped)
        served.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
        assert served.ended(run)["state_type"] == "CANCELLED"
        served.wait_for(lambda: not pool.cells(), 60)
        assert len(list(RUNS.glob("*"))) == 1, "one cell, which went on"
    except AssertionError as error:
        error.add_note(pool.log.read_text())
        raise
