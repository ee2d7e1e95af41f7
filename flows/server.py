"""Prefect's server as a command's flow uses it: kept past Ctrl-C, told of it, and ended with this process."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from dptune.errors import DptuneError
from dptune.files import locked

#: In Prefect's home: held while its temporary server starts.
SERVER_LOCK = "dptune-server.lock"
_SECONDS = 3.0  # a server that does not answer must not keep Ctrl-C from ending the flow


def start_server() -> None:
    """Start Prefect's temporary server, unless the settings name another one, out of reach of Ctrl-C and SIGTERM.

    Prefect starts it itself with a flow's first request; then Ctrl-C at a terminal, or SIGTERM to the flow's process
    group, ends it together with the flow, and its database keeps the run as running for ever. Two servers that make the
    tables of a new database at once break each other, so flows start theirs in turn.
    """
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url is None:
        settings.home.mkdir(parents=True, exist_ok=True)
        # A session of its own: Ctrl-C and a signal to this process' group do not reach it.
        alone = SimpleNamespace(Popen=partial(subprocess.Popen, start_new_session=True))
        with locked(settings.home / SERVER_LOCK, wait=True), patch("prefect.server.api.server.subprocess", alone):
            try:
                SubprocessASGIServer().start()
            except RuntimeError as error:
                limit = settings.server.ephemeral.startup_timeout_seconds
                problem = f"Prefect's temporary server did not answer in {limit} s"
                fix = "run again when less else runs, or raise PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
                raise DptuneError(f"{problem}. Fix: {fix}.") from error
        end_server_with_me()


def cancel_run(meanwhile: Callable[[], None] = lambda: None) -> None:
    """Tell Prefect that this process' flow run, and its tasks under way, were cancelled; if it answers in time.

    Args:
        meanwhile: what else there is to do, while Prefect is told.
    """
    from prefect.runtime import flow_run

    if not flow_run.id:
        meanwhile()
        return
    # In this context: it knows which server the flow's is.
    telling = threading.Thread(target=copy_context().run, args=(_cancel, str(flow_run.id)), daemon=True)
    telling.start()
    meanwhile()
    telling.join(_SECONDS)


def _cancel(run: str) -> None:
    from uuid import UUID

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.objects import State
    from prefect.states import Cancelled

    state: State[Any] = Cancelled(message="Stopped; run again to go on.")
    under_way: UUID | None = UUID(run)
    with suppress(Exception), get_client(sync_client=True) as client:  # the flow ends in any case
        while under_way:  # this run, the run that it is a part of, and so on
            client.set_flow_run_state(under_way, state, force=True)
            own = FlowRunFilter(id=FlowRunFilterId(any_=[under_way]))
            for task in client.read_task_runs(flow_run_filter=own):
                if task.state is not None and not task.state.is_final():
                    client.set_task_run_state(task.id, state, force=True)
            part = client.read_flow_run(under_way).parent_task_run_id
            under_way = client.read_task_run(part).flow_run_id if part else None


def end_server_with_me() -> None:
    """End Prefect's temporary server, if this process started one, when this process ends, even if it is killed.

    Prefect itself stops the server at a normal exit only.
    """
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer().server_process
    if server is not None and server.pid not in _watched:
        # This process is the pipe's only writer, so the kernel closes the pipe when it ends. The watcher has a session
        # of its own; otherwise Ctrl-C would end it before the server.
        command = ["sh", "-c", "cat >/dev/null; kill $0 2>/dev/null", str(server.pid)]
        _watched[server.pid] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def watched_processes() -> set[int]:
    """Process ids of the temporary server and its watcher: they end with this process, and until then can be told."""
    return {*_watched, *(watcher.pid for watcher in _watched.values())}


_watched: dict[int, subprocess.Popen[bytes]] = {}  # holds a reference: a garbage-collected Popen would close its pipe
