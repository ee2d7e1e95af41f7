"""Prefect's server as a command's flow uses it: kept past Ctrl-C, told of it, and ended with this process."""

from __future__ import annotations

import base64
import hmac
import os
import re
import secrets
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import psutil
from prefect import Flow
from prefect.client.schemas.objects import State
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from dptune.core.errors import DptuneError
from dptune.core.files import locked

#: In Prefect's home: held while its temporary server starts.
SERVER_LOCK = "dptune-server.lock"
P = ParamSpec("P")
R = TypeVar("R")
#: The password of each temporary server that this process has started, by the server's process id.
_PASSWORDS: dict[int, str] = {}
_SECONDS = 3.0  # a server that does not answer must not keep Ctrl-C from ending the flow


@contextmanager
def own_server() -> Iterator[None]:
    """Context with Prefect's temporary server, out of reach of Ctrl-C, unless settings name another one.

    Prefect starts it itself with a flow's first request; then Ctrl-C at a terminal, or SIGTERM to the flow's process
    group, ends it together with the flow, and its database keeps the run as running for ever; and it obeys every user
    of the machine. Two servers that make the tables of a new database at once break each other, so flows start theirs
    in turn. One that this process has started already serves on.

    Raises: DptuneError if it does not answer in time, if another process has taken its port, or if a flow is under way
        on a server that Prefect started itself.
    """
    from prefect.context import FlowRunContext
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_API_AUTH_STRING, get_current_settings, temporary_settings

    settings = get_current_settings()
    if settings.api.url is not None:
        yield
        return
    server = SubprocessASGIServer()
    if server.server_process is not None and (known := _PASSWORDS.get(server.server_process.pid)):
        with temporary_settings({PREFECT_API_AUTH_STRING: known}):
            yield
        return
    if server.running:  # Prefect's own, which a notebook's other work has started
        if FlowRunContext.get() is not None:
            problem = "a flow is under way on Prefect's temporary server, which obeys every user of this machine"
            fix = "put `with flows.server.own_server():` around that flow, or name a server by PREFECT_API_URL"
            raise DptuneError(f"{problem}. Fix: {fix}.")
        server.stop()
    settings.home.mkdir(parents=True, exist_ok=True)
    password = new_password()
    alone = SimpleNamespace(Popen=partial(_apart, password))
    with temporary_settings({PREFECT_API_AUTH_STRING: password}):
        with locked(settings.home / SERVER_LOCK, wait=True), patch("prefect.server.api.server.subprocess", alone):
            server = SubprocessASGIServer()  # one that was stopped is another
            try:
                server.start()
            except RuntimeError as error:
                limit = settings.server.ephemeral.startup_timeout_seconds
                problem = f"Prefect's temporary server did not answer in {limit} s"
                fix = "run again when less else runs, or raise PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
                raise DptuneError(f"{problem}. Fix: {fix}.") from error
        end_server_with_me()
        # What a server answers, a flow believes, down to files that it loads.
        if server.server_process is None or not listens(server.server_process.pid, server.port or 0):
            raise DptuneError(f"another process took port {server.port} of Prefect's temporary server. Fix: run again.")
        _PASSWORDS[server.server_process.pid] = password
        yield


class OwnFlow(Flow[P, R]):
    """A flow that, wherever it is called, runs on ``own_server``: in Python and in a notebook as by a command."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the flow, as Prefect's own does."""
        with own_server():
            return super().__call__(*args, **options)

    def with_options(self, **options: Any) -> Any:
        """A copy with other options, as Prefect makes it; it runs on ``own_server`` too."""
        made = super().with_options(**options)
        made.__class__ = type(self)
        return made


def flow(**options: Any) -> Callable[[Callable[P, R]], OwnFlow[P, R]]:
    """Prefect's decorator of the same name, for an ``OwnFlow``."""
    return lambda work: OwnFlow(work, **options)


def _apart(password: str, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Start the server in a session of its own, which Ctrl-C and a signal to this process' group do not reach.

    Its libraries log nothing: a server that ends with the flow cuts its database's connections, each with a traceback.
    What Prefect itself logs is not concerned.
    """
    env = {"PREFECT_LOGGING_ROOT_LEVEL": "CRITICAL", **env, **prefect_settings(password)}
    guarded = {"prefect.server.api.server:create_app": "flows.server:prefect_app"}
    command = [guarded.get(word, word) for word in args]
    command[command.index("--app-dir") + 1] = str(Path(__file__).parents[1])
    return subprocess.Popen(command, env=env, start_new_session=True, **options)


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
    from prefect.states import Cancelled

    state: State[Any] = Cancelled(message="Stopped; run again to go on.")
    under_way: UUID | None = UUID(run)
    with suppress(Exception), get_client(sync_client=True) as client:  # the flow ends in any case
        while under_way:  # this run, the run that it is a part of, and so on
            before = client.read_flow_run(under_way).state
            if before is None or not is_suspended(before):  # Resume on its page lets a suspended one go on
                client.set_flow_run_state(under_way, state, force=True)
            own = FlowRunFilter(id=FlowRunFilterId(any_=[under_way]))
            for task in client.read_task_runs(flow_run_filter=own):
                if task.state is not None and not task.state.is_final():
                    client.set_task_run_state(task.id, state, force=True)
            part = client.read_flow_run(under_way).parent_task_run_id
            under_way = client.read_task_run(part).flow_run_id if part else None


def is_suspended(state: State[Any]) -> bool:
    """Whether *Suspend* on Prefect's page made this state; a run that waits for an answer is paused, not suspended."""
    return state.is_paused() and bool(state.state_details.pause_reschedule)


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


# Prefect's and MLflow's servers for their owner and their own pages alone, as `make ui` and every flow start them.


HOST = "127.0.0.1"
USER = "dptune"
#: What a browser or a client calls this machine. Under any other name a web page asks that made its own name mean this
#: machine ("DNS rebinding"). Any port, for a tunnel may have another one.
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")


def new_password() -> str:
    """A random user:password, as Prefect takes it."""
    return f"{USER}:{secrets.token_urlsafe(32)}"


def prefect_settings(password: str) -> dict[str, str]:
    """The environment of Prefect's server with which it asks for the password."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": f"http://{HOST}",  # instead of all; its own pages need no entry
    }


def listens(process: int, port: int) -> bool:
    """Whether this very process listens on a port of this machine: another user's may have taken it meanwhile."""
    with suppress(psutil.Error):  # it has just ended
        found = psutil.Process(process).net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)
    return False


class Guarded:
    """An ASGI application that answers 403 to other hosts and origins than its own, and 401 without the password.

    Args:
        app: the application.
        password: user:password; None if the application asks for its password itself.
    """

    def __init__(self, app: ASGIApp, password: str | None = None) -> None:
        self.app = app
        self.expected = None if password is None else f"Basic {base64.b64encode(password.encode()).decode()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)  # before it is accepted: status 403
        else:
            await refusal(scope, receive, send)

    def _refusal(self, headers: Headers) -> PlainTextResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not _OWN_HOST.fullmatch(host):
            return PlainTextResponse("this server is reached only as 127.0.0.1 or localhost", 403)
        if origin not in (None, f"http://{host}"):
            return PlainTextResponse("pages of other servers may not ask this one", 403)
        given = headers.get("authorization", "")
        if self.expected is not None and not hmac.compare_digest(given.encode(), self.expected.encode()):
            ask = {"WWW-Authenticate": 'Basic realm="dptune", charset="UTF-8"'}
            return PlainTextResponse("make ui says where the password is", 401, ask)
        return None


def prefect_app() -> Guarded:
    """Prefect's server, which asks for the password itself."""
    if not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        raise ValueError("PREFECT_SERVER_API_AUTH_STRING is not set: anybody could run commands")
    from prefect.server.api.server import create_app

    return Guarded(create_app(final=True))


def mlflow_app() -> Guarded:
    """MLflow's server, with the pipeline's own runs and files."""
    password = f"{os.environ['MLFLOW_TRACKING_USERNAME']}:{os.environ['MLFLOW_TRACKING_PASSWORD']}"
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    from tasks.mlflow.tracking import tracking_uri
    from tasks.paths import DATA

    # MLflow's own command hands these to its server, which it starts without anybody's application around it.
    os.environ[BACKEND_STORE_URI_ENV_VAR] = tracking_uri()
    os.environ[ARTIFACT_ROOT_ENV_VAR] = (DATA / "mlartifacts").resolve().as_uri()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "starlette.middleware.wsgi is deprecated")  # MLflow's own use of it
        from mlflow.server.fastapi_app import app
    return Guarded(app, password)
