"""Answers of models: ``dptune score`` and ``sample`` ask an adapter; ``generate`` and ``serve``, an ensemble."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dptune.cli.console import by_option, notice, set_up_logs, show
from dptune.cli.options import AsJson, Completion, Messages, Model, Prompt, Revision, Template, Text, takes_settings
from dptune.cli.tune import records_of_options
from dptune.cli.tune_result import comparison, printed_scores
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import read_json
from dptune.core.interrupts import ends_like_ctrl_c
from dptune.core.streams import read_input

if TYPE_CHECKING:
    from dptune.prediction.deployment import Deployment

_NOT_COVERED = "Scores are statistics of these records: where they are private, no epsilon covers them."


@takes_settings("device", "dtype")
def score(
    adapter: Annotated[Path, typer.Argument(help="Folder that dptune tune wrote, or the folder of its run.")],
    model: Model,
    data: Annotated[
        Path | None,
        typer.Option(
            help="File of records to score on; rows that share a prompt are one input with several references."
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Benchmark or plug-in source to read records from, instead of --data.")
    ] = None,
    source_options: Annotated[
        list[str] | None,
        typer.Option("--source-set", help="Argument of --source, as KEY=VALUE; repeatable."),
    ] = None,
    revision: Revision = None,
    prompt: Prompt = None,
    completion: Completion = None,
    text: Text = None,
    messages: Messages = None,
    template: Template = None,
    label: Annotated[
        str | None, typer.Option(help="Column that holds the labels, for a classifier (default: label).")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics to compute, separated by commas (default: the usual ones).")
    ] = None,
    mauve_model: Annotated[
        str | None, typer.Option(help="Public checkpoint that embeds the texts for the metric mauve.")
    ] = None,
    mauve_revision: Annotated[str | None, typer.Option(help="Commit of --mauve-model, if that is a hub id.")] = None,
    beams: Annotated[int, typer.Option(help="Number of beams; 1 decodes greedily.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Exponent of the length in the score of a beam.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per output.")] = 64,
    no_repeat_ngram: Annotated[
        int, typer.Option(help="Never repeat a sequence of this many tokens; 0 allows repeats.")
    ] = 0,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw tokens at random instead of searching for the likeliest.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Temperature of the draws with --sample.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="With --sample, draw only from the likeliest tokens of this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws with --sample.")] = 0,
    block: Annotated[
        int | None, typer.Option(help="Tokens of a text that are read at once (default: the training limit).")
    ] = None,
    outputs: Annotated[Path | None, typer.Option(help="File to write prompts and outputs to, as JSON Lines.")] = None,
    rows: Annotated[int, typer.Option(help="Number of rows in a batch.")] = 16,
    *,
    settings: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Score an adapter on records: its outputs against references, its perplexity, or a classifier's accuracy."""
    from dptune.job.delivery.verification import adapter_within, is_classifier
    from dptune.job.path_checks import check_data, check_model

    adapter = adapter_within(adapter)
    classifies = is_classifier(adapter, label)
    columns = {"text": text, "prompt": prompt, "completion": completion, "messages": messages, "template": template}
    records, _ = records_of_options(data, source, source_options, None, columns | {"label": label})
    check_model(model, revision)
    _check_mauve(mauve_model, mauve_revision)
    check_data(records)
    set_up_logs()
    from dptune.generation.decoding import Decoding
    from dptune.job.scoring import OF_CLASSIFIER, check_left_out, score_adapter, write_outputs
    from dptune.training.models.model import ModelSource

    if classifies:
        check_left_out({"outputs": outputs}, OF_CLASSIFIER)

    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        beams=beams,
        length_penalty=length_penalty,
        no_repeat_ngram=no_repeat_ngram,
        sample=sample,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    chosen = None if metrics is None else [name.strip() for name in metrics.split(",")]
    base = ModelSource(model, revision, settings["dtype"] or "float32")
    found = score_adapter(
        adapter,
        base,
        records,
        decoding=decoding,
        metrics=chosen,
        mauve_model=None if mauve_model is None else ModelSource(mauve_model, mauve_revision),
        block=block,
        device=settings["device"],
        rows=rows,
        warn=lambda note: notice("warning", by_option(note)),
        keep=None if outputs is None else partial(write_outputs, outputs),
    )
    if outputs is not None and not found.outputs:
        notice("warning", "texts are scored by their perplexity: nothing was written to --outputs")
    counts = {"inputs": found.inputs} | ({"references": found.references} if found.references else {})
    signed = {f"{name}_is": signature for name, signature in found.signatures.items()}
    figures = printed_scores(found.figures, found.inputs) if classifies else found.figures
    show(counts | figures | (signed | {"not_covered": _NOT_COVERED} if as_json else {}), as_json)
    if not as_json:
        if classifies:
            typer.echo(comparison(found.figures, found.inputs))
        for name, signature in found.signatures.items():  # whole, as a table would cut them
            typer.echo(f"{name}: {signature}")
        typer.echo(_NOT_COVERED)


def _check_mauve(model: str | None, revision: str | None) -> None:
    """Raises: ConfigError for a folder that is no checkpoint, a hub's name without its commit, or a commit alone."""
    from dptune.job.path_checks import check_model

    if revision is not None and (model is None or Path(model).expanduser().is_dir()):
        problem = "is given without --mauve-model" if model is None else "is given, and --mauve-model is a folder"
        raise ConfigError("--mauve-revision", problem, fix="leave it out, or give the model's name on the hub")
    try:
        if model is not None:
            check_model(model, revision)
    except ConfigError as error:
        field = "--mauve-revision" if error.field == "model.revision" else "--mauve-model"
        raise ConfigError(field, error.problem, fix=error.fix) from None


# ``dptune sample``: a synthetic corpus from a tuned adapter, at no further cost.


_INTERRUPTED = 130
_COVERED = (
    "SYNTHETIC. They cost nothing beyond the adapter's own epsilon and delta, however many are made; a run on the same "
    "units that uses them pays on top."
)
_NO_GUARANTEE = "SYNTHETIC, with NO GUARANTEE: the adapter has no certified epsilon."


@takes_settings("device", "dtype", "load_in_4bit")
@ends_like_ctrl_c()
def sample(
    adapter: Annotated[Path, typer.Argument(help="Folder that dptune tune wrote.")],
    model: Model,
    records: Annotated[
        int | None, typer.Option(help="Number of texts (default with --prompts: one for each prompt).", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="New JSON Lines file; its card is written beside it as .md.")] = Path(
        "synthetic.jsonl"
    ),
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of public prompts or chats, used in turn, for an adapter that was tuned on such."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Column of the prompts (default: prompt; for chats: messages).")
    ] = None,
    revision: Revision = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature: 1 keeps the model's probabilities; less prefers likely texts.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Draw only from the likeliest tokens that together have this probability.")
    ] = 1.0,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum tokens per text (default: the training limit).", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draws; need not be secret.")] = 0,
    rows: Annotated[int, typer.Option("--rows", "--batch", help="Number of texts generated at once.", min=1)] = 16,
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="Allow an adapter without a certified epsilon.")
    ] = False,
    *,
    settings: dict[str, Any],
    as_json: AsJson = False,
) -> None:
    """Write a synthetic corpus with a tuned adapter; this is post-processing and costs no further privacy."""
    from dptune.job.delivery.finished_adapter import open_adapter
    from dptune.job.delivery.privacy_section import has_guarantee
    from dptune.job.path_checks import card_beside, check_data, check_model, check_new_file
    from dptune.records.reading.source import RecordSource

    try:
        check_new_file(out)
        check_model(model, revision)
        if prompts is not None:
            check_data(RecordSource(str(prompts)))
        opened = open_adapter(adapter, no_guarantee=no_guarantee)
        set_up_logs()
        from dptune.job.sampling import sample as draw

        found = draw(
            opened,
            model,
            records,
            prompts=None if prompts is None else str(prompts),
            prompt=prompt,
            revision=revision,
            temperature=temperature,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
            rows=rows,
            **settings,
            no_guarantee=no_guarantee,
            warn=lambda note: notice("warning", by_option(note)),
        )
        found.save(out)
    except KeyboardInterrupt:
        notice("stopped", "no file was written; the same command makes the same texts")
        raise typer.Exit(_INTERRUPTED) from None
    guarantee = {"epsilon_certified": opened.epsilon, "delta": opened.contents.header.delta}
    show({**found.figures, **guarantee, "file": str(out), "card": str(card_beside(out))}, as_json)
    if not as_json:
        typer.echo(_COVERED if has_guarantee(opened.epsilon) else _NO_GUARANTEE)
        typer.echo(f"Train on them: dptune tune --data {out}; or any other training, with privacy or without.")


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
