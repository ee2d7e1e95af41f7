"""``dptune sample``: a synthetic corpus from a tuned adapter, at no further cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.cli.console import notice, show
from dptune.cli.options import AsJson, Model, Revision, takes_settings
from dptune.cli.tune_messages import by_option, set_up_logs
from dptune.core.interrupts import ends_like_ctrl_c

_INTERRUPTED = 130
_COVERED = (
    "SYNTHETIC. They cost nothing beyond the adapter's own epsilon and delta, however many are made; a run on the same "
    "units that uses them pays on top."
)
_NOT_COVERED = "SYNTHETIC, with NO GUARANTEE: the adapter has no certified epsilon."


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
        typer.echo(_COVERED if has_guarantee(opened.epsilon) else _NOT_COVERED)
        typer.echo(f"Train on them: dptune tune --data {out}; or any other training, with privacy or without.")
