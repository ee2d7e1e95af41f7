"""Synthetic corpus of a finished cell: samples it, and writes its card and its page.

python -m tasks.synthetic data/runs/NAME --records 1000        # `make sample RUN=data/runs/NAME`

Post-processing: it reads the cell's adapter and its public base model, no record, and costs nothing. No stage of DVC:
nobody wants texts of every cell.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import altair as alt
import typer

from dptune.cli.console import show_progress
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.core.files import locked, private_directory, read_json, write_text
from dptune.job.delivery.finished_adapter import PROMPTED, FinishedAdapter, open_adapter
from dptune.job.delivery.privacy_section import NO_GUARANTEE, has_guarantee, why_not
from dptune.job.path_checks import card_beside
from dptune.job.result import RunResult
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.training.models.model_names import name_of
from tasks.charts.canvas import Figure, Panel, save, values
from tasks.charts.looks import BLUE, looks
from tasks.experiment.adapter_model import finished_cell, form_of_records, write_usable
from tasks.experiment.cells import Cell
from tasks.paths import AUDITS, SYNTHETIC
from tasks.report.claims import shown_epsilon
from tasks.report.numbers import digits4
from tasks.report.page import write, write_index
from tasks.stage import run_command

if TYPE_CHECKING:
    from dptune.job.sampling import Sampled

#: A file that says that all files are made, and are being put at their places.
_WHOLE = "whole"
#: How many texts are drawn where nobody says.
_RECORDS = 1000
_MOST_BARS = 24
#: How many texts the page shows.
SHOWN = 10
_FIGURES = {
    "texts": "texts",
    "mean_tokens": "mean length in tokens",
    "mean_characters": "mean length in characters",
    "share_duplicates": "texts that equal an earlier one",
    "share_ended": "texts that the model ended itself",
    "drawn_again": "empty texts that were drawn again",
}
_UNKNOWN_FORM = (
    "the records that lie here now are others than the cell trained on, so whether those were texts, prompts with "
    "targets or chats was not checked"
)


@dataclass(frozen=True)
class OpenedCell:
    """A finished cell that can be sampled. Public.

    Attributes:
        path: its folder.
        result: content of its result.json.
        form: form of the records that it trained on, one of ``parquet_file.FORMS``; None if nothing here shows it.
    """

    path: Path
    cell: Cell
    result: RunResult
    form: str | None


def sample_cell(
    run: Path, records: int | None = None, prompts: Path | None = None, *, no_guarantee: bool = False
) -> tuple[Path, str]:
    """Sample texts from the cell in the folder ``run`` into data/synthetic, with their card and their page.

    Args:
        records: number of texts; None draws 1,000, or one for each prompt.
        prompts: public prompts, for a cell that trained on prompts with targets, or chats, for one that did on chats.
        no_guarantee: also sample a cell without a certified epsilon; card and page say so.

    Returns: the page, and the sentence that it opens with.

    Raises: ConfigError, DataError and LedgerError before anything is written.
    """
    opened = open_cell(run, no_guarantee=no_guarantee)
    out = SYNTHETIC / f"{opened.path.name}.jsonl"
    made = (out, card_beside(out), out.with_suffix(".png"), out.with_suffix(".html"))
    if opened.form in PROMPTED and prompts is None:
        learned, asked = PROMPTED[opened.form]
        problem, fix = f"are missing: the cell trained on {learned}", f"give a file of {asked}"
        raise ConfigError("prompts", problem, fix=f"{fix}: make sample RUN=... PROMPTS=FILE")
    work = private_directory(SYNTHETIC) / f".{out.stem}.partial"
    with locked(RunFolder(opened.path).lock):
        _forget_unfinished(work, made)
        if there := [path for path in made if path.exists() or path.is_symlink()]:
            problem = f"{there[0]} exists: {run} was sampled before"
            raise ConfigError("run", problem, fix=f"move away {out.stem}.* there")
        try:
            answer = _write(opened, private_directory(work), records, prompts, out.name, no_guarantee=no_guarantee)
            write_text(work / _WHOLE, "")
            for path in made:  # the page last, for the index lists pages
                (work / path.name).rename(path)
            (work / _WHOLE).unlink()
        finally:
            _forget_unfinished(work, made)
    write_index()
    return made[-1], answer


def _forget_unfinished(work: Path, made: Sequence[Path]) -> None:
    """Remove the folder in which files are made, and those of a killed process that were at their places already."""
    if (work / _WHOLE).exists():
        for path in made:
            if not (work / path.name).exists():
                path.unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def open_cell(run: Path, *, no_guarantee: bool = False) -> OpenedCell:
    """Check that a folder holds a finished cell that writes texts, whose ledger, adapter and base model are its own.

    Raises: ConfigError, DataError or LedgerError, which say what to do.
    """
    cell, folder = finished_cell(run), RunFolder(run)
    if cell.task.classifies:
        raise ConfigError(
            "run", f"{run} is a classifier, which writes no texts", fix="give a cell that trained on texts"
        )
    contents, result = read_ledger(folder.ledger), RunResult.read(folder.result)
    if not has_guarantee(contents.epsilons.certified) and not no_guarantee:
        problem = f"{run} has no certified epsilon ({why_not(contents.epsilons.leaks)})"
        fix = "give another cell, or allow texts without any guarantee: make sample RUN=... NO_GUARANTEE=1"
        raise ConfigError("run", problem, fix=fix)
    return OpenedCell(run.resolve(), cell, result, form_of_records(result.data))


def _write(
    opened: OpenedCell, folder: Path, records: int | None, prompts: Path | None, name: str, *, no_guarantee: bool
) -> str:
    """Sample, and write texts, card, picture and page into ``folder``. Returns the page's answer."""
    from dptune.job.sampling import sample  # torch takes seconds, and a wrong folder is told before

    model = opened.cell.model
    found = sample(
        _deliver(opened, folder / "adapter", no_guarantee=no_guarantee),
        model.source,
        _RECORDS if records is None and prompts is None else records,
        prompts=None if prompts is None else str(prompts),
        revision=model.revision,
        dtype=model.dtype,
        load_in_4bit=model.load_in_4bit,
        no_guarantee=no_guarantee,
    )
    if opened.form is None:
        found = replace(found, notes=(*found.notes, _UNKNOWN_FORM))
    return write_page(found, opened.result, found.save(folder / name))


def _deliver(opened: OpenedCell, folder: Path, *, no_guarantee: bool) -> FinishedAdapter:
    """Write what ``dptune tune`` would deliver of the cell, with tokenizer and card, and check it in the same way."""
    cell = opened.cell
    write_usable(cell, opened.path, folder)
    found = open_adapter(folder, no_guarantee=no_guarantee)
    base, revision, tokens = name_of(cell.model.source), cell.model.revision, cell.training.max_length
    return replace(found, base=base, revision=revision, form=opened.form, tokens=tokens)


# The page: its guarantee, its figures and its first texts. It reads no private record.


def write_page(found: Sampled, result: RunResult, file: Path) -> str:
    """Write the page and the picture beside ``file``, which holds the texts. Returns the sentence that answers first.

    Args:
        result: of the cell that wrote the texts.
    """
    name, header = file.stem, found.adapter.contents.header
    figure = lengths(name, found.written)
    save(figure, file.with_suffix(".png"))
    opening = answer(found, result.mechanism)
    write(
        "synthetic.html.j2",
        file.with_suffix(".html"),
        [figure],
        looks([result.mechanism]),
        opening=[opening],
        name=name,
        result=result,
        header=header,
        guaranteed=has_guarantee(found.adapter.epsilon),
        epsilons=found.adapter.contents.epsilons,
        audited=audited(name),
        figures_of_texts=shown_figures(found.figures),
        settings=found.settings,
        prompts=found.prompts,
        notes=found.notes,
        first=found.rows[:SHOWN],
        count=len(found.rows),
    )
    return opening


def answer(found: Sampled, mechanism: str) -> str:
    """The sentence that opens the page: how many texts there are, and what is guaranteed."""
    count, contents = len(found.rows), found.adapter.contents
    texts = f"{count:,} SYNTHETIC text{'s' if count != 1 else ''}"
    if not has_guarantee(found.adapter.epsilon):
        return f"{texts} with {NO_GUARANTEE}: `{mechanism}` has no certified ε ({why_not(contents.epsilons.leaks)})."
    cost = f"certified ε = {at_most(found.adapter.epsilon)} at δ = {at_most(contents.header.delta)}"
    return f"{texts} with the guarantee of `{mechanism}`: {cost}, however many are drawn."


def shown_figures(figures: Mapping[str, float]) -> dict[str, str]:
    """The card's figures by what readers call them."""
    shares = ("share_duplicates", "share_ended")
    counts = ("texts", "drawn_again")
    return {
        said: f"{100 * figures[key]:.3g} %"
        if key in shares
        else f"{figures[key]:,.0f}"
        if key in counts
        else digits4(figures[key])
        for key, said in _FIGURES.items()
    }


def audited(run: str) -> float | None:
    """The largest lower bound that an audit of the run shows; None if it was not audited, or nothing was planted."""
    file = AUDITS / run / "audit.json"
    return shown_epsilon(read_json(file)) if file.exists() else None


# Lengths of synthetic texts. The texts alone are drawn: no private record is beside them.


def lengths(name: str, texts: Sequence[str]) -> Figure:
    """How many texts are how long, in characters.

    Args:
        name: of the figure, and the stem of its picture.
    """
    counted = [len(text) for text in texts]
    width = _width(max(counted) - min(counted) + 1)
    found = Counter(length // width * width for length in counted)
    rows = [
        {"from": start, "to": start + width, "length": _range(start, start + width - 1), "texts": count, "zero": 0}
        for start, count in sorted(found.items())
    ]
    x = alt.X("from:Q", title="characters of a text", scale=alt.Scale(zero=False, nice=False, padding=8))
    y = alt.Y("texts:Q", title="texts", axis=alt.Axis(tickMinStep=1, format="~g"))
    tooltip = [alt.Tooltip("length:N", title="characters"), alt.Tooltip("texts:Q", title="texts")]
    bars = alt.Chart(values(rows)).mark_bar(color=BLUE[0], binSpacing=1)
    drawn = bars.encode(x=x, x2="to:Q", y=y, y2="zero:Q", tooltip=tooltip)
    return Figure(name, "Lengths of the SYNTHETIC texts", (Panel(drawn, "", 300),))


def _width(span: int) -> int:
    """The least of 1, 2, 5, 10, 20, ... characters with which so wide a range needs no more than ``_MOST_BARS``."""
    least = span / _MOST_BARS
    power = 10 ** max(0, math.floor(math.log10(least))) if least > 1 else 1
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def _range(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else f"{first}"


def main(
    run: Annotated[Path | None, typer.Argument(help="folder of a finished cell: data/runs/NAME")] = None,
    records: Annotated[
        int | None, typer.Option(help="number of texts (default: 1,000, or one for each prompt)")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="public prompts or chats, for a cell of prompts with targets or of chats")
    ] = None,
    no_guarantee: Annotated[
        bool, typer.Option("--no-guarantee", help="allow a cell without a certified epsilon")
    ] = False,
) -> None:
    """Sample a synthetic corpus from a finished cell."""
    if run is None:
        raise ConfigError("run", "is missing", fix="make sample RUN=data/runs/NAME, a finished cell")
    show_progress()
    page, answer = sample_cell(run, records, prompts, no_guarantee=no_guarantee)
    print(answer.replace("`", ""))
    print(f"It cost nothing. Open {page}; texts and card lie beside it, as .jsonl and .md.")


if __name__ == "__main__":
    run_command(main)
