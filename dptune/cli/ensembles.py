"""``dptune generate`` and ``dptune serve``: answers from an ensemble, within its budget."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import notice, show
from dptune.cli.options import AsJson
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import read_json
from dptune.core.streams import read_input

if TYPE_CHECKING:
    from dptune.prediction.deployment import Deployment

Ensemble = Annotated[Path | None, typer.Option(help="Folder of the ensemble (default: the pipeline's ensemble).")]
RegisterFile = Annotated[
    Path | None, typer.Option("--register", help="Register of spent budgets (default: the ensemble's register).")
]
Device = Annotated[str, typer.Option(help="Device that computes: cpu, cuda, cuda:1, ...")]
_PIPELINE = Path("data/prediction/results.json")
TOKEN_VARIABLE = "DPTUNE_SERVE_TOKEN"
_LEAST_TOKEN = 16
_HOST = re.compile(r"[A-Za-z0-9.-]+|[0-9A-Fa-f:.]+")
_TRUSTED = re.compile(r"(\*\.)?[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
_ANY_ADDRESS = ("0.0.0.0", "::")


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; leave it empty to start a new text.")] = "",
    tokens: Annotated[
        int, typer.Option(help="Maximum number of new tokens; must not exceed the tokens left in the budget.", min=1)
    ] = 32,
    ensemble: Ensemble = None,
    register: RegisterFile = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Answer a prompt privately; every token is charged to the ensemble's ledger and cannot be refunded."""
    from dptune.prediction.deployment import check_prompt, deploy
    from dptune.privacy.budget_gate import BudgetError
    from dptune.privacy.ledger_file import LedgerError

    check_prompt(prompt)
    where = _device(device)
    deployment, answers = deploy(ensemble or _served_ensemble(), where, register=register), []
    try:
        _check_left(tokens, deployment.budget)
        _warn(deployment)
        for answer in deployment.generate(prompt, tokens):
            answers.append(answer)
    except (BudgetError, LedgerError) as error:
        if not answers:
            raise  # if there are answers, print them: they are paid for
        notice("stopped", str(error))
    finally:
        deployment.predictor.close()
    if as_json:
        show({"text": deployment.text(answers), "answered": [a.token for a in answers], **deployment.budget}, as_json)
        return
    typer.echo(deployment.text(answers))
    last, budget = answers[-1], deployment.budget
    left = f"{last.tokens_left} of {budget['tokens']} tokens left"
    spent = f"epsilon {at_most(last.epsilon_spent, 4)} of {budget['epsilon']:g} at delta {at_most(last.delta)} spent"
    about = f"{left}; {spent}, for one {last.unit}. Data: {budget['data']}."
    if budget["earlier"]:
        about += f" Runs that were set aside had spent epsilon {budget['earlier_epsilon']} on the same records before."
    typer.echo(about, err=True)


def _warn(deployment: Deployment) -> None:
    """Say to the owner alone what the register knows; clients read the budget of this ensemble."""
    for note in deployment.notes:
        notice("warning", note)


def _check_left(tokens: int, budget: dict[str, Any]) -> None:
    """Refuse an answer that would end early because the budget runs out. Raises: ConfigError if too little is left."""
    left = budget["tokens_left"]
    if 0 < left < tokens:
        problem = f"{tokens} are requested, and only {left} of {budget['tokens']} are left, for good"
        raise ConfigError("--tokens", problem, fix=f"use --tokens {left} to spend all of them, or fewer")


def serve(
    ensemble: Ensemble = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default accepts connections only from this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    register: RegisterFile = None,
    device: Device = "cpu",
    trusted_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients may use, in addition to localhost and --host; repeatable."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the bearer token that clients must send (or set {TOKEN_VARIABLE}).")
    ] = None,
) -> None:
    """Answer prompts over HTTP within one budget; the service's OpenAPI page is at /docs."""
    try:
        import uvicorn

        from dptune.prediction.service import LOCAL_HOSTS, create_app
    except ImportError as error:
        raise ConfigError("serve", f"needs {error.name}", fix="pip install 'dptune[serve]'") from None
    from dptune.prediction.deployment import deploy

    hosts, token = _hosts(host, trusted_host or []), _token(token_file)
    if token is None and host not in ("localhost", "127.0.0.1", "::1"):
        warning = f"anyone who reaches {host} can spend the budget: set {TOKEN_VARIABLE} or --token-file"
        notice("warning", warning)
    where = _device(device)
    deployment = deploy(ensemble or _served_ensemble(), where, register=register)
    try:
        _warn(deployment)
        uvicorn.run(create_app(deployment, [*LOCAL_HOSTS, *hosts], token), host=host, port=port, log_level="warning")
    finally:
        deployment.predictor.close()


def _hosts(host: str, trusted: list[str]) -> list[str]:
    """The names that a Host header may hold, besides this machine's own. Raises: ConfigError for a malformed one."""
    if not _HOST.fullmatch(host):
        raise ConfigError("--host", f"{host!r} is not a name or an address", fix="use 127.0.0.1, or 0.0.0.0 for all")
    for name in trusted:
        if not _TRUSTED.fullmatch(name):
            problem = f"{name!r} is not a host name (without port)"
            raise ConfigError(
                "--trusted-host", problem, fix="use answers.example.com, or *.example.com for all below it"
            )
    bound = [] if host in _ANY_ADDRESS else [f"[{host}]" if ":" in host else host]
    return [*bound, *trusted]


def _token(file: Path | None) -> str | None:
    """The bearer token from a file or the environment, None if unset; never an argument, which other users can see."""
    given = os.environ.get(TOKEN_VARIABLE)
    if file is not None and given is not None:
        raise ConfigError("--token-file", f"is given, and {TOKEN_VARIABLE} is set too", fix="keep one of them")
    if file is not None:
        try:
            given = read_input(file).decode("ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError("--token-file", f"cannot be read ({error})", fix="give a file of ASCII text") from None
    if given is None:
        return None
    name = "--token-file" if file is not None else TOKEN_VARIABLE
    if not (len(given) >= _LEAST_TOKEN and given.isascii() and given.isprintable() and " " not in given):
        problem = f"is not a token of {_LEAST_TOKEN} or more printable ASCII characters without spaces"
        raise ConfigError(name, problem, fix="make one with `openssl rand -hex 32`")
    return given


def _served_ensemble() -> Path:
    try:
        return Path(read_json(_PIPELINE)["served"])
    except (OSError, ValueError, KeyError):
        problem = f"is not given, and {_PIPELINE} names none: the stage prediction has not ended here"
        fix = "run `dvc repro prediction` where params.yaml lies (it says why, if it fails), or give --ensemble"
        raise ConfigError("--ensemble", problem, fix=fix) from None


def _device(name: str) -> Any:
    from dptune.training.models.model import check_device

    return check_device(name)
