"""What another user of this machine can do to a server."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

_NOBODY = 65534
T = TypeVar("T")


def as_nobody(work: Callable[..., T], *arguments: Any) -> T:
    """What a function of a module returns to uid nobody. The test is skipped where it cannot become another user."""
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    forking = multiprocessing.get_context("fork")  # another user may not read this checkout, nor start its Python
    with ProcessPoolExecutor(1, mp_context=forking, initializer=_become_nobody) as pool:
        return pool.submit(work, *arguments).result()


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


@dataclass
class Asker:
    """Someone who asks a server.

    Attributes:
        headers: headers of every request.
        refused: what was asked, with the status of its refusal.
        answered: what was answered, with the answer.
    """

    headers: dict[str, str] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    answered: dict[str, Any] = field(default_factory=dict)

    def ask(self, method: str, url: str, body: Any = None) -> Any:
        """The answer; None if it is refused."""
        data = None if body is None else json.dumps(body).encode()
        asking = Request(url, data, {"Content-Type": "application/json", **self.headers}, method=method)
        name = f"{method} /{url.split('/', 3)[3]}"
        try:
            with urlopen(asking, timeout=60) as answer:
                text = answer.read()
        except HTTPError as error:
            self.refused[name] = error.code
            return None
        try:
            self.answered[name] = json.loads(text)
        except ValueError:
            self.answered[name] = text
        return self.answered[name]


def attack_prefect(server: str, deployment: str, flow: str, headers: dict[str, str]) -> Asker:
    """Try to read and write everything that leads to commands of the owner; with a token if the server gives one.

    Args:
        deployment, flow: ids, which the owner told nobody.
    """
    one, api = Asker(headers), f"{server}/api"
    step = {"prefect.deployments.steps.run_shell_script": {"script": "id"}}
    token = one.ask("GET", f"{api}/csrf-token?client=nobody")
    if token:
        one.headers |= {"Prefect-Csrf-Client": "nobody", "Prefect-Csrf-Token": token["token"]}
    evil = {"flow_id": flow, "pull_steps": [step], "entrypoint": "flow.py:f", "path": "/tmp"}
    for path in ("admin/settings", f"deployments/{deployment}", "ui-settings"):
        one.ask("GET", f"{api}/{path}")
    one.ask("POST", f"{api}/deployments/", {"name": "study", **evil})
    one.ask("POST", f"{api}/deployments/", {"name": "of nobody", **evil})
    one.ask("PATCH", f"{api}/deployments/{deployment}", {"entrypoint": "flow.py:f"})
    one.ask("POST", f"{api}/deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    one.ask("POST", f"{api}/flows/", {"name": "of nobody"})
    one.ask("POST", f"{api}/flow_runs/", {"flow_id": flow, "state": {"type": "SCHEDULED"}})
    one.ask("POST", f"{api}/deployments/filter", {})
    one.ask("POST", f"{api}/logs/filter", {})
    one.ask("DELETE", f"{api}/deployments/{deployment}")
    return one


def attack_mlflow(server: str, headers: dict[str, str]) -> Asker:
    """Try to read and write MLflow's experiments."""
    one = Asker(headers)
    for api in ("api", "ajax-api"):
        one.ask("GET", f"{server}/{api}/2.0/mlflow/experiments/search?max_results=5")
        one.ask("POST", f"{server}/{api}/2.0/mlflow/experiments/create", {"name": f"of nobody by {api}"})
        one.ask("POST", f"{server}/{api}/2.0/mlflow/experiments/delete", {"experiment_id": "0"})
    one.ask("POST", f"{server}/graphql", {"query": "{ __typename }"})
    one.ask("PUT", f"{server}/api/2.0/mlflow-artifacts/artifacts/evil.txt", {})
    one.ask("GET", f"{server}/")
    return one


def read_secrets(processes: list[int], file: str) -> list[str]:
    """Names of the processes' environments, and of the file, that another user can read."""
    found = []
    for path in (*(f"/proc/{process}/environ" for process in processes), file):
        try:
            with open(path, "rb") as opened:
                opened.read()
            found.append(path)
        except OSError:
            continue
    return found
