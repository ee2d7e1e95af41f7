"""A flow as a command, and its cells, watched from outside."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tasks.experiment.cells import Cell


class RunningFlow:
    """A flow's module as a command, with a Prefect server of its own, in a session of its own."""

    def __init__(self, directory: Path, module: str = "flows.experiment") -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {
            "PREFECT_HOME": str(directory / "data" / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the user's home
        }
        self.log = directory / "flow.log"
        command = [sys.executable, "-m", module]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self) -> str:
        """Wait for its end; what it printed."""
        assert self.process.wait() == 0, self.log.read_text()
        return self.log.read_text()

    def of(self, cell: Cell) -> psutil.Process | None:
        """The process that runs a cell, if one does."""
        return self.child_with(str(cell.directory / "cell.json"))

    def child_with(self, argument: str) -> psutil.Process | None:
        """The process that has ``argument`` on its command line, if one does."""
        for one in self.children():
            try:
                if argument in one.cmdline():
                    return one
            except psutil.Error:
                continue
        return None

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []

    def wait_until(self, true: Callable[[], bool]) -> None:
        """For as long as the flow lives; only a hang reaches the guard that pytest has."""
        while not true():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def end(self) -> None:
        """Whatever a failed test left."""
        for one in self.children():
            one.kill()
        self.process.kill()
        self.process.wait()


def charged(cell: Cell) -> int:
    """How many releases a cell's ledger holds."""
    ledger = cell.directory / "ledger.jsonl"
    return ledger.read_bytes().count(b'"kind":"release"') if ledger.exists() else 0
