"""A command's run of a flow is listed under the deployment that does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import write_params

from flows import deployed_run as module
from flows.deployed_run import run_deployed
from flows.deployments import deployments, fields_of
from flows.form import file_values
from flows.server import flow, own_server
from tasks.settings.params import load_settings


@flow(name="audit", flow_run_name="audit of tiny")
def small(overrides: dict[str, Any] | None = None) -> Any:
    """A flow that has the name of one of ours, and returns what it was given."""
    return overrides


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_commands_run_hangs_under_the_deployment_before_and_after_its_form_is_registered(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_HOME, temporary_settings

    write_params()
    settings = load_settings()
    with temporary_settings({PREFECT_HOME: empty / "home"}), own_server():
        assert run_deployed(small, settings, overrides={"audit": {"seed": 1}}) == {"audit": {"seed": 1}}
        (form,) = [one for one in deployments() if one.name == "audit"]
        form.apply()
        run_deployed(small, settings)
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("audit/audit")
            first, second = sorted(client.read_flow_runs(), key=lambda run: str(run.created))
    assert {(run.name, run.state_type.value, run.deployment_id) for run in (first, second)} == {
        ("audit of tiny", "COMPLETED", deployment.id)
    }
    assert first.parameters == {}
    assert second.parameters == file_values("audit", fields_of("audit"), settings), "so Retry has the form's values"


def test_a_run_that_prefect_refuses_to_list_runs_nevertheless(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise OSError("no server")

    class Plain:
        name = "audit"

        def __call__(self, **given: Any) -> dict[str, Any]:
            return given

    write_params()
    monkeypatch.setattr(module, "get_client", refuse)
    assert run_deployed(Plain(), load_settings(), overrides={}) == {"overrides": {}}  # type: ignore[arg-type]
