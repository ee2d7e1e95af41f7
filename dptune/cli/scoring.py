"""Commands on an adapter: ``dptune score`` measures it, and ``dptune sample`` writes a synthetic corpus with it.

``dptune score`` prints metrics of what it writes, its perplexity of texts, or a classifier's accuracy.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.cli.console import by_option, notice, set_up_logs, show
from dptune.cli.options import AsJson, Completion, Model, Prompt, Revision, Template, Text, takes_settings
from dptune.cli.tune import records_of_options
from dptune.cli.tune_result import comparison, printed_scores
from dptune.core.errors import ConfigError
from dptune.core.interrupts import ends_like_ctrl_c

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
        typer.Option(help="File of public prompts, used in turn; for an adapter tuned on prompts and completions."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Column that holds the prompts (default: prompt).")] = None,
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
    from dptune.job.delivery.card import has_guarantee
    from dptune.job.delivery.finished_adapter import open_adapter
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
