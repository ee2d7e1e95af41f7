"""Samples a synthetic corpus from a finished cell, and writes its card and its page.

python -m tasks.synthetic data/runs/NAME --records 1000        # `make sample RUN=data/runs/NAME`

Post-processing: it reads the cell's adapter and its public base model, no record, and costs nothing. No stage of DVC:
nobody wants texts of every cell.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dptune.cli.console import show_progress
from dptune.core.errors import ConfigError, DataError
from dptune.core.files import locked, naming, private_directory, write_text
from dptune.job.delivery.card import has_guarantee, why_not
from dptune.job.delivery.finished_adapter import FinishedAdapter, open_adapter
from dptune.job.delivery.weights import adapter_digest
from dptune.job.path_checks import card_beside
from dptune.job.result import RunResult
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.records.parquet_file import form_at, read_about
from dptune.training.models.model_names import name_of
from tasks.experiment.cells import Cell, is_finished, model_digest
from tasks.paths import SYNTHETIC, TRAIN
from tasks.report.page import write_index
from tasks.stage import run_command

#: A file that says that all files are made, and are being put at their places.
_WHOLE = "whole"
#: How many texts are drawn where nobody says.
_RECORDS = 1000
_SAME_PRICE = 0.05
_UNKNOWN_FORM = (
    "the records that lie here now are others than the cell trained on, so whether those were texts, or prompts with "
    "targets, was not checked"
)


@dataclass(frozen=True)
class OpenedCell:
    """A finished cell that can be sampled. Public.

    Attributes:
        path: its folder.
        result: content of its result.json.
        form: form of the records that it trained on, one of ``corpus.records.FORMS``; None if nothing here shows it.
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
        prompts: public prompts, for a cell that trained on prompts with targets.
        no_guarantee: also sample a cell without a certified epsilon; card and page say so.

    Returns: the page, and the sentence that it opens with.

    Raises: ConfigError, DataError and LedgerError before anything is written.
    """
    opened = open_cell(run, no_guarantee=no_guarantee)
    out = SYNTHETIC / f"{opened.path.name}.jsonl"
    made = (out, card_beside(out), out.with_suffix(".png"), out.with_suffix(".html"))
    if opened.form == "pair" and prompts is None:
        problem = "are missing: the cell trained on prompts with targets"
        raise ConfigError("prompts", problem, fix="give a file of public prompts: make sample RUN=... PROMPTS=FILE")
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
    path, folder = run.resolve(), RunFolder(run)
    if not run.is_dir():
        raise ConfigError(
            "run", f"{run} is not a folder", fix="give the folder of a finished cell: `ls data/runs` lists them"
        )
    try:
        cell = Cell.model_validate_json(folder.cell.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        fix = "give the folder of a finished cell in data/runs; `dptune sample` takes any other adapter"
        raise ConfigError("run", f"{run} is not a cell's folder: it has no cell.json", fix=fix) from None
    if cell.task.classifies:
        raise ConfigError(
            "run", f"{run} is a classifier, which writes no texts", fix="give a cell that trained on texts"
        )
    if not is_finished(run):
        raise ConfigError("run", f"{run} has not ended", fix="run its study again, which goes on with it; then sample")
    contents, result = read_ledger(folder.ledger), RunResult.read(folder.result)
    # The price tells apart cells that differ in epsilon alone. A later accountant may price a little lower.
    priced = math.isclose(contents.epsilons.certified, result.epsilon_certified, rel_tol=_SAME_PRICE)
    if (contents.header.mechanism, contents.header.delta) != (cell.mechanism, cell.delta) or not priced:
        raise DataError("is the ledger of another cell", fix="restore the cell's own", file=folder.ledger)
    if adapter_digest(run) != result.adapter_sha256:
        raise DataError("is not what the run of this ledger wrote", fix="restore it", file=folder.adapter)
    if not has_guarantee(contents.epsilons.certified) and not no_guarantee:
        problem = f"{run} has no certified epsilon ({why_not(contents.epsilons.leaks)})"
        fix = "give another cell, or allow texts without any guarantee: make sample RUN=... NO_GUARANTEE=1"
        raise ConfigError("run", problem, fix=fix)
    if model_digest(cell.model) != cell.inputs["model"]:
        problem = f"{cell.model.source} is another model than {run} was trained on, or is gone"
        raise ConfigError("model.source", problem, fix="restore that model: for the pipeline's own, by its `pretrain`")
    form = _form(result.data)
    if form == "messages":
        fix = "render public messages by its chat template for transformers' generate, which costs nothing either"
        raise ConfigError("run", f"{run} was trained on chats, which are not sampled yet", fix=fix)
    return OpenedCell(path, cell, result, form)


def _form(data: str) -> str | None:
    """The form of the records called ``data``, if those lie here now. Their description is read, and no record."""
    try:
        about = read_about(TRAIN)
    except DataError:
        return None
    return form_at(about) if about["label"] == data else None


def _write(
    opened: OpenedCell, folder: Path, records: int | None, prompts: Path | None, name: str, *, no_guarantee: bool
) -> str:
    """Sample, and write texts, card, picture and page into ``folder``. Returns the page's answer."""
    from dptune.job.sampling import sample  # torch takes seconds, and a wrong folder is told before
    from tasks.report.synthetic import write_page

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
    from dptune.training.models.model import load_tokenizer
    from tasks.experiment.adapter_model import write_deliverable

    cell = opened.cell
    with naming(folder):
        load_tokenizer(cell.model.weights).save_pretrained(str(folder))
    write_deliverable(cell, opened.path, folder)
    found = open_adapter(folder, no_guarantee=no_guarantee)
    base, revision, tokens = name_of(cell.model.source), cell.model.revision, cell.training.max_length
    return replace(found, base=base, revision=revision, form=opened.form, tokens=tokens)


def main(
    run: Annotated[Path | None, typer.Argument(help="folder of a finished cell: data/runs/NAME")] = None,
    records: Annotated[
        int | None, typer.Option(help="number of texts (default: 1,000, or one for each prompt)")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="public prompts, for a cell of prompts with targets")] = None,
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
