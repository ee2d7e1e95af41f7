"""A small HTTP service over one deployment: ``POST /generate``, ``GET /budget``, and its OpenAPI page at ``/docs``.

One process holds the ledger's lock. Requests run side by side and are charged token by token, so that no number of
clients can overspend. What a client gets was charged; what was charged may be lost if the process dies.

A budget that is spent is gone for good, so requests are checked. A request must name one of the service's hosts;
otherwise a page of another site could send a browser here under a name of its own (DNS rebinding). It may need a token.
A body that is too long is refused before it is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from secrets import compare_digest
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dptune.core.errors import ConfigError
from dptune.prediction.deployment import MOST_CHARACTERS, Deployment
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.ledger_file import LedgerError

#: Host names by which this machine reaches its own service.
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_MOST = 1024
_BODY = 16 * MOST_CHARACTERS  # bytes; a character is at most 12 of them in JSON
_bearer = HTTPBearer(auto_error=False)


class Question(BaseModel):
    """A prompt, and how many tokens may follow it. Unknown keys are refused, for a misspelt one would cost tokens."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(max_length=MOST_CHARACTERS)] = ""
    tokens: Annotated[int, Field(strict=True, ge=1, le=_MOST)] = 32  # strict: JSON's true is not taken for 1


class Budget(BaseModel):
    """The budget that is spent and left."""

    tokens: int
    tokens_left: int
    epsilon: float
    epsilon_spent: float
    delta: float
    unit: str
    models: int
    data: str
    earlier: int
    earlier_epsilon: float | str


class Reply(BaseModel):
    """The text that follows the prompt, token by token, and the budget after its last token."""

    text: str
    answered: list[int]
    tokens_left: int
    epsilon_spent: float
    delta: float
    unit: str
    stopped: str | None = None


def create_app(deployment: Deployment, hosts: Sequence[str] = LOCAL_HOSTS, token: str | None = None) -> FastAPI:
    """Make the service over an open deployment.

    Args:
        hosts: names that a request's Host header may have; "*.example.com" stands for all below it.
        token: bearer token that ``/generate`` and ``/budget`` require; None requires none.
    """
    app = FastAPI(
        title="dptune private prediction",
        description=f"Answers are differentially private for one {deployment.predictor.protocol.unit}. "
        f"Data: {deployment.manifest.data}. When all tokens are spent, every request is refused. {_before(deployment)}",
    )

    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=_BODY)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)  # the outer one
    app.add_exception_handler(RequestValidationError, _invalid)

    def check_token(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
        if credentials is None or not compare_digest(credentials.credentials.encode(), str(token).encode()):
            raise HTTPException(401, "needs the service's bearer token", headers={"WWW-Authenticate": "Bearer"})

    needed = [Depends(check_token)] if token is not None else []

    @app.get("/budget", dependencies=needed)
    def budget() -> Budget:
        """The budget that is spent and left."""
        return Budget(**deployment.budget)

    @app.post("/generate", dependencies=[*needed, Depends(_each_key_once)], responses=_REFUSALS)
    def generate(question: Question) -> Reply:
        """Tokens that follow a prompt; fewer than were asked for where the budget or the text ends."""
        answers: list[Any] = []
        stopped = None
        try:
            for answer in deployment.generate(question.prompt, question.tokens):
                answers.append(answer)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        except (BudgetError, LedgerError) as error:
            if not answers:
                raise HTTPException(403 if isinstance(error, BudgetError) else 503, str(error)) from None
            stopped = str(error)  # the tokens before are charged, so they are still returned
        last = answers[-1]
        return Reply(
            text=deployment.text(answers),
            answered=[answer.token for answer in answers],
            tokens_left=last.tokens_left,
            epsilon_spent=last.epsilon_spent,
            delta=last.delta,
            unit=last.unit,
            stopped=stopped,
        )

    return app


async def _each_key_once(request: Request) -> None:
    """Refuse an object that gives a key twice: of two numbers of tokens, one was not meant."""

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise HTTPException(422, "a key is given twice. Fix: give each key once.")
        return dict(pairs)

    with suppress(ValueError, RecursionError):  # what is no JSON is refused where it is read
        json.loads(await request.body(), object_pairs_hook=read)


def _before(deployment: Deployment) -> str:
    said = "; ".join(f"{one.folder}: {one}" for one in deployment.earlier)
    return f"Runs on the same records that were set aside add to what is spent ({said})." if said else ""


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The Host header is not one of the service's names, or the body is not JSON."},
    401: {"description": "The bearer token is missing or wrong."},
    403: {"description": "All tokens are spent."},
    413: {"description": "The body is too large."},
    503: {"description": "The ledger cannot be charged."},
}


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """Answer with the problem, but without the input, which may not be JSON: a NaN, or half of a surrogate pair."""
    assert isinstance(error, RequestValidationError)
    detail = [
        {"type": str(item["type"]), "loc": [_printable(part) for part in item["loc"]], "msg": _printable(item["msg"])}
        for item in error.errors()
    ]
    return JSONResponse({"detail": detail}, status_code=422)


def _printable(value: Any) -> int | str:
    return value if isinstance(value, int) else str(value).encode("utf-8", "backslashreplace").decode()
