"""``python -m flows.ui`` as a command on free ports, watched from outside."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import psutil
import pytest

from dptune.core.files import write_text

#: Stands for DVC: the data is there already.
_DVC = "print(\"Stage 'pretrain' didn't change, skipping\", flush=True)\n"
_ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class RunningUi:
    """A running ``make ui`` whose Prefect server keeps its database in ``directory``.

    Attributes:
        prefect, mlflow: addresses of the two servers.
    """

    def __init__(self, directory: Path) -> None:
        ports = [free_port(), free_port()]
        self.prefect, self.mlflow = (f"http://127.0.0.1:{port}" for port in ports)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {
            "DPTUNE_PREFECT_PORT": str(ports[0]),
            "DPTUNE_MLFLOW_PORT": str(ports[1]),
            "PREFECT_HOME": str(directory / "data" / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",  # seconds; ten would only be waited for
        }
        self.environment = environment
        self.log = directory / "ui.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.ui"], env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self.seen: dict[int, psutil.Process] = {}
        self.password_file = directory / "data" / "ui.env"

    @property
    def client_environment(self) -> dict[str, str]:
        """What ``. data/ui.env`` sets, for commands of Prefect's that shall ask this server."""
        lines = self.password_file.read_text().splitlines()
        return {**self.environment, **dict(line.removeprefix("export ").split("=", 1) for line in lines)}

    @property
    def password(self) -> str:
        """user:password."""
        return self.client_environment["PREFECT_API_AUTH_STRING"]

    @property
    def basic(self) -> str:
        """The header Authorization."""
        return f"Basic {base64.b64encode(self.password.encode()).decode()}"

    def ask(self, path: str, body: Any = None) -> Any:
        """What Prefect's API answers to GET, or to POST with a body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": self.basic}
        if data is not None:
            client = str(uuid4())
            headers |= {"Prefect-Csrf-Client": client}
            headers |= {"Prefect-Csrf-Token": self.ask(f"/csrf-token?client={client}")["token"]}
        asking = Request(f"{self.prefect}/api{path}", data, headers)
        while True:
            try:
                with urlopen(asking) as answer:
                    return json.load(answer)
            except HTTPError as error:
                if error.code != 503:  # the server's SQLite is busy: ask again, as Prefect's own client does
                    raise
                time.sleep(0.5)

    def wait_for(self, check: Callable[[], Any], seconds: float = 1800.0) -> Any:
        """The first true answer. Raises: AssertionError with the log once a server has ended, or the time is over."""
        until = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log.read_text()
            with suppress(OSError):
                if found := check():
                    return found
            assert time.monotonic() < until, f"nothing in {seconds:g} s\n{self.log.read_text()}"
            time.sleep(0.5)

    def deployment(self, name: str) -> Any:
        """A deployment, once it is served."""
        return self.wait_for(lambda: self.ask(f"/deployments/name/{name}/{name}"))

    def runs(self, deployment: Any) -> list[Any]:
        """All runs of a deployment, those that the scheduler made included."""
        return list(self.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [deployment["id"]]}}}))

    def ended(self, run: str) -> Any:
        """A run, once it has ended."""

        def end() -> Any:
            self.note()
            found = self.ask(f"/flow_runs/{run}")
            return found if found["state_type"] in _ENDED else None

        return self.wait_for(end)

    def scheduled_run(self, deployment: Any, seconds: float = 900.0) -> Any:
        """The first run of a deployment that a schedule made, once it has ended.

        Raises: AssertionError with the log if none has begun after ``seconds``: a cron of one minute needs 60 at most,
        and the rest is for a busy machine.
        """

        def begun() -> Any:
            return [one for one in self.runs(deployment) if one["auto_scheduled"] and one["start_time"]]

        try:
            (first, *_) = self.wait_for(begun, seconds)
        except AssertionError as error:
            error.add_note(f"{self.ask('/deployments/' + deployment['id'])}\n{self.runs(deployment)[:3]}")
            raise
        return self.ended(first["id"])

    def note(self) -> None:
        """Remember every process that belongs to it now."""
        for one in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[one.pid] = one

    def left(self) -> list[str]:
        """Which of those still run."""
        return [str(one) for one in self.seen.values() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def stop(self) -> int:
        """Ctrl-C's effect. Returns the status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def end(self) -> None:
        """Whatever a failed test left."""
        if self.process.poll() is None:
            self.note()
            self.process.kill()
        self.process.wait()
        for one in self.seen.values():
            if one.is_running():
                one.kill()


@contextmanager
def without_data(directory: Path) -> Iterator[RunningUi]:
    """A running ``make ui`` whose pipeline has no data, once it says how to sign in."""
    from tiny_pipeline import prepare_environment, write_params

    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        write_params()
        running = RunningUi(directory)
        try:
            running.deployment("policy")  # the last one
            running.wait_for(lambda: "Sign in" in running.log.read_text())
            yield running
            running.stop()
        finally:
            running.end()


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def listening(address: str) -> bool:
    """Whether something listens at http://127.0.0.1:PORT."""
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0


def without_dvc() -> None:
    """Let a study in the current directory take the data as they are."""
    write_text(Path("dvc/__main__.py"), _DVC)
    write_text(Path("dvc/__init__.py"), "")
