"""Prefect's and MLflow's servers for their owner and their own pages alone, as `make ui` and every flow start them.

    uvicorn --factory flows.guarded:prefect_app    # its password: PREFECT_SERVER_API_AUTH_STRING
    uvicorn --factory flows.guarded:mlflow_app     # its password: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD

Whoever may write to Prefect's server runs commands as its owner, for a deployment's pull steps are commands. Any user
of this machine reaches its port, and so does any web page that the owner opens. Passwords are in environments, which
other users cannot read; command lines they can.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import secrets
import warnings
from contextlib import suppress

import psutil
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

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
            return PlainTextResponse("this server is reached as 127.0.0.1 or localhost alone", 403)
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

    from tasks.paths import DATA
    from tasks.tracking import tracking_uri

    # MLflow's own command hands these to its server, which it starts without anybody's application around it.
    os.environ[BACKEND_STORE_URI_ENV_VAR] = tracking_uri()
    os.environ[ARTIFACT_ROOT_ENV_VAR] = (DATA / "mlartifacts").resolve().as_uri()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "starlette.middleware.wsgi is deprecated")  # MLflow's own use of it
        from mlflow.server.fastapi_app import app
    return Guarded(app, password)
