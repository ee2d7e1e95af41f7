"""``dptune generate`` and ``dptune serve``: answers from an ensemble, within its budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from dptune.console import show
from dptune.errors import ConfigError
from dptune.privacy.ledger import BudgetError

Ensemble = Annotated[Path | None, typer.Option(help="Folder of the ensemble [the pipeline's own].")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
_PIPELINE = Path("data/prediction/results.json")


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; empty begins a new one.")] = "",
    tokens: Annotated[int, typer.Option(help="At most so many.", min=1)] = 32,
    ensemble: Ensemble = None,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer a prompt privately; every token is charged to the ensemble's ledger, and never given back."""
    from dptune.prediction.deployment import deploy

    where = _device(device)
    deployment, answers = deploy(ensemble or _served(), where), []
    try:
        for answer in deployment.generate(prompt, tokens):
            answers.append(answer)
    except BudgetError as error:
        if not answers:
            raise
        Console(stderr=True).print(f"[yellow]stopped:[/yellow] {escape(str(error))}", soft_wrap=True)
    finally:
        deployment.predictor.close()
    if as_json:
        show({"text": deployment.text(answers), "answered": [a.token for a in answers], **deployment.budget}, as_json)
        return
    typer.echo(deployment.text(answers))
    last, budget = answers[-1], deployment.budget
    left = f"{last.tokens_left} of {budget['tokens']} tokens left"
    spent = f"epsilon {last.epsilon_spent:.4g} of {budget['epsilon']:g} at delta {last.delta:g} spent"
    about = f"{left}; {spent}, for one {last.unit}. Data: {budget['data']}."
    Console(stderr=True).print(escape(about), soft_wrap=True, highlight=False)


def serve(
    ensemble: Ensemble = None,
    host: Annotated[str, typer.Option(help="This machine only, unless you say so.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Of the service.")] = 8000,
    device: Device = "cpu",
) -> None:
    """Answer prompts over HTTP within one budget; its OpenAPI page is at /docs."""
    try:
        import uvicorn

        from dptune.prediction.service import create_app
    except ImportError as error:
        raise ConfigError("serve", f"needs {error.name}", fix="pip install 'dptune[serve]'") from None
    from dptune.prediction.deployment import deploy

    where = _device(device)
    deployment = deploy(ensemble or _served(), where)
    try:
        uvicorn.run(create_app(deployment), host=host, port=port, log_level="warning")
    finally:
        deployment.predictor.close()


def _served() -> Path:
    try:
        return Path(json.loads(_PIPELINE.read_text(encoding="utf-8"))["served"])
    except (OSError, ValueError, KeyError):
        fix = "run `dvc repro` or `python -m flows.prediction`, or give --ensemble"
        raise ConfigError("--ensemble", "is not given, and the pipeline has made none here", fix=fix) from None


def _device(name: str) -> Any:
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("--device", f"{name!r} cannot be used ({error})", fix="use cpu, or cuda:0") from None
