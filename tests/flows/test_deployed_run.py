"""A command's run of a flow is listed under the deployment that does the same."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import ROOT, prepare_environment, write_params

from flows.common import deployed_run as module
from flows.common.deployed_run import UNSERVED, run_deployed
from flows.common.form import file_values
from flows.deployments import deployments, fields_of
from flows.server import flow, own_server
from tasks.settings.params import load_settings

#: A command's flow, which presses its own Cancel as the page does, and then works until it is ended.
CANCELLED = """
import time
from prefect import get_client
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.server.api.server import SubprocessASGIServer
from prefect.states import Cancelling
from flows.common.command import begin_flow, run_flow
from flows.common.deployed_run import run_deployed
from flows.server import flow, own_server
from tasks.settings.params import load_settings

@flow(name="audit", flow_run_name="audit of tiny")
def long():
    begin_flow()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Cancelling())
    time.sleep(600)

with own_server(), temporary_settings({PREFECT_API_URL: SubprocessASGIServer().api_url}):
    run_flow(lambda: run_deployed(long, load_settings()), lambda: "at work")
"""


@flow(name="audit", flow_run_name="small audit")
def small(overrides: dict[str, Any] | None = None) -> Any:
    """A flow that has the name of one of ours, and returns what it was given."""
    return overrides


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_commands_run_hangs_under_the_deployment_before_and_after_its_form_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import PREFECT_HOME, temporary_settings

    prepare_environment(monkeypatch, tmp_path)
    write_params()
    settings = load_settings()
    with temporary_settings({PREFECT_HOME: tmp_path / "home"}), own_server():
        with get_client(sync_client=True) as client, suppress(ObjectNotFound):  # another test's, on the same server
            client.delete_deployment(client.read_deployment_by_name("audit/audit").id)
        assert run_deployed(small, settings, overrides={"audit": {"seed": 1}}) == {"audit": {"seed": 1}}
        with get_client(sync_client=True) as client:
            assert client.read_deployment_by_name("audit/audit").description == UNSERVED
        (form,) = [one for one in deployments() if one.name == "audit"]
        form.apply()
        run_deployed(small, settings)
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("audit/audit")
            own = [run for run in client.read_flow_runs() if run.name == "small audit"]  # beside other tests'
        first, second = sorted(own, key=lambda run: run.start_time)
    assert {(run.name, run.state_type.value, run.deployment_id) for run in (first, second)} == {
        ("small audit", "COMPLETED", deployment.id)
    }
    assert deployment.description.startswith("The attacks on every cell"), "its form is there, and served"
    assert first.parameters == {}
    assert second.parameters == file_values("audit", fields_of("audit"), settings), "so Retry has the form's values"


@pytest.mark.system
@pytest.mark.timeout(900)
def test_cancel_on_the_page_of_a_commands_run_ends_the_command(tmp_path: Path) -> None:
    """No worker has started the command, so none ends it. Any server that has a page is named by PREFECT_API_URL."""
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**plain, "PYTHONPATH": path, "PREFECT_HOME": str(tmp_path / "home")}
    command = subprocess.run(
        [sys.executable, "-c", CANCELLED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert command.stderr.splitlines()[-1] == "stopped at work; run again to go on", command.stdout + command.stderr
    assert command.returncode == 130
    with closing(sqlite3.connect(tmp_path / "home" / "prefect.db")) as database:
        assert database.execute("SELECT name, state_type FROM flow_run").fetchall() == [("audit of tiny", "CANCELLED")]


def test_a_run_that_prefect_refuses_to_list_runs_nevertheless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise OSError("no server")

    class Plain:
        name = "audit"

        def __call__(self, **given: Any) -> dict[str, Any]:
            return given

    prepare_environment(monkeypatch, tmp_path)
    write_params()
    monkeypatch.setattr(module, "get_client", refuse)
    assert run_deployed(Plain(), load_settings(), overrides={}) == {"overrides": {}}  # type: ignore[arg-type]
