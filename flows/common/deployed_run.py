"""Deployed run: a command's run of a flow, listed with the runs that its deployment's form started."""

from __future__ import annotations

import logging
from typing import Any

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.settings import get_current_settings
from prefect.states import Pending
from prefect.utilities.callables import get_call_parameters

from flows.common.command import end_when_stopped_on_page
from flows.common.form import file_values
from tasks.settings.params import Settings

_log = logging.getLogger(__name__)
#: What the page of a deployment says until `make ui` registers its form and serves it.
UNSERVED = (
    "A command made this deployment to list its own runs. It has no form, and nothing starts a run that is asked for "
    "here, until `make ui` serves it."
)


def run_deployed(flow: Flow[..., Any], settings: Settings, **given: Any) -> Any:
    """Run a flow as a run of the deployment that has its name, as `make repro` does and `make ui` shows.

    The run's parameters are the form's, with the values of ``settings``. Before the first `make ui` there is no form:
    then a deployment of that name is made without one, which `make ui` completes, and the run has no parameters. Where
    Prefect refuses any of this, the flow runs without a deployment. On the page of such a run, *Cancel* ends this
    process as Ctrl-C does, and so does *Suspend*.

    Args:
        given: the flow's arguments.

    Returns: what the flow returns.
    """
    try:
        run = _run_of_deployment(flow, settings)
    except Exception as error:  # a list on a page must not keep the work from being done
        _log.debug("the run is listed under no deployment: %s", error)
        return flow(**given)
    if get_current_settings().api.url is not None:  # a server with a page; a command's temporary one has none
        end_when_stopped_on_page(run.id)
    return run_flow(flow, flow_run=run, parameters=get_call_parameters(flow.fn, (), given))


def _run_of_deployment(flow: Flow[..., Any], settings: Settings) -> FlowRun:
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(f"{flow.name}/{flow.name}")
            form = found.parameter_openapi_schema or {}
            values = file_values(flow.name, form.get("properties", {}), settings)
            deployment = found.id
        except ObjectNotFound:
            flow_id = client.create_flow(flow)
            deployment = client.create_deployment(flow_id, flow.name, description=UNSERVED, tags=["dptune"])
            values = {}
        # Pending: what serves the deployment begins only scheduled runs, so none of it begins this one too.
        return client.create_flow_run_from_deployment(deployment, parameters=values, state=Pending())
