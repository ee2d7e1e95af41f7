"""A small HTTP service over one deployment: ``POST /generate``, ``GET /budget``, and its OpenAPI page at ``/docs``.

One process holds the ledger's lock. Requests run side by side and are charged token by token, so that no number of
clients can overspend. What a client gets was charged; what was charged may be lost if the process dies.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from dptune.errors import ConfigError
from dptune.prediction.deployment import Deployment
from dptune.privacy.ledger import BudgetError, LedgerError

_MOST = 1024


class Question(BaseModel):
    """A prompt, and how many tokens may follow it."""

    prompt: str = ""
    tokens: Annotated[int, Field(ge=1, le=_MOST)] = 32


class Budget(BaseModel):
    """What is spent and what is left."""

    tokens: int
    tokens_left: int
    epsilon: float
    epsilon_spent: float
    delta: float
    unit: str
    models: int
    data: str


class Reply(BaseModel):
    """The text that follows the prompt, token by token, and the budget after its last token."""

    text: str
    answered: list[int]
    tokens_left: int
    epsilon_spent: float
    delta: float
    unit: str
    stopped: str | None = None


def create_app(deployment: Deployment) -> FastAPI:
    """The service over an open deployment."""
    app = FastAPI(
        title="dptune private prediction",
        description=f"Answers are differentially private for one {deployment.predictor.protocol.unit}. "
        f"Data: {deployment.manifest.data}. When all tokens are spent, every request is refused.",
    )

    @app.get("/budget")
    def budget() -> Budget:
        """What is spent and what is left."""
        return Budget(**deployment.budget)

    @app.post("/generate", responses={403: {"description": "All tokens are spent."}})
    def generate(question: Question) -> Reply:
        """Tokens that follow a prompt; fewer than were asked for where the budget or the text ends."""
        answers: list[Any] = []
        stopped = None
        try:
            for answer in deployment.generate(question.prompt, question.tokens):
                answers.append(answer)
        except BudgetError as error:
            if not answers:
                raise HTTPException(403, str(error)) from None
            stopped = str(error)
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        except LedgerError as error:
            raise HTTPException(503, str(error)) from None
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
