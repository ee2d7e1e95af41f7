"""``dptune score``: metrics of what an adapter writes, its perplexity of texts, or a classifier's accuracy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.cli.accuracy import comparison, printed_scores
from dptune.cli.console import notice, show
from dptune.cli.options import AsJson, Completion, Model, Prompt, Revision, Template, Text, takes_settings
from dptune.cli.tune import records_of_options
from dptune.cli.tune_messages import by_option, set_up_logs
from dptune.core.errors import ConfigError

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
    columns = {"text": text, "prompt": prompt, "completion": completion, "template": template, "label": label}
    records, _ = records_of_options(data, source, source_options, None, columns)
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
    not_covered = {"not_covered": _NOT_COVERED}
    figures = printed_scores(found.figures, found.inputs) if classifies else found.figures
    show(counts | figures | (signed | not_covered if as_json else {}), as_json)
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
