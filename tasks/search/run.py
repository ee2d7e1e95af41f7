"""Runs a search in a process of its own: reads the pipeline's records, searches, and keeps what may be told.

    python -m tasks.search.run --device cpu        # `make search` runs it within its flow

Of the candidates nothing is said: neither how many there are, nor how far they came, nor what went wrong with one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DataError, DptuneError
from dptune.core.files import PRIVATE_FILE, forget_times, locked, private_directory, read_json, write_json
from dptune.core.settings import RECORD
from dptune.job.base_model import open_base
from dptune.job.preparation import PreparedRun, prepare_sides
from dptune.job.result import PUBLIC
from dptune.job.run import Tuned, paid_before, working_in
from dptune.job.run import run_here as run_once
from dptune.job.search.kinds import settings_of
from dptune.job.search.rehearsal import Rehearsed, rehearsed
from dptune.job.search.search import NoWinnerError, id_of, search
from dptune.job.settings import TuneSettings
from dptune.mechanisms.planning import price
from dptune.privacy.certificate import FILE, SearchCertificate, read_certificate
from dptune.privacy.run_folder import RunFolder, runs_within
from dptune.privacy.spent_budgets.register import Register
from dptune.records.parquet_file import read_about
from dptune.records.reading.read import Sides
from dptune.records.reading.record import Chat, Content, PromptTarget, Text
from dptune.records.reading.source import RecordSource
from tasks.paths import EVAL, FAILURES, PUBLIC_VALIDATION, SEARCH, SPENT
from tasks.search.publishable import told_of, told_of_nothing
from tasks.search.ranking import check_ended, check_held_out, forget_losers, rank_privately, unless_diverged
from tasks.search.request import (
    UNIT,
    check_search,
    digest_of,
    folder_of,
    in_the_file,
    model_of,
    refuse_paid,
    tune_settings,
    twin_name,
    twin_source,
)
from tasks.settings.params import Settings, load_settings
from tasks.split_records import ATTACK_SIDE, TRAIN_SIDE, split_records
from tasks.stage import keep_failure, keep_text, run_command

_log = logging.getLogger("tasks.search")  # this module is also run as a command
#: What a rehearsal without a result says, in the words of ``NoWinnerError``.
_DIVERGED = (
    "the private run diverged, so the base model is the result, and the budget is spent. "
    "Fix: lower the learning rates of the space; another search adds its cost."
)
_SECRET = "the number of candidates is secret, so no progress is shown"


class SearchError(DptuneError):
    """A search that stopped on the way. What it says is the same whatever stopped it."""


def search_records(settings: Settings, device: str | None = None) -> Path:
    """Search the records of the pipeline, or go on with the search of this name; a finished one is left as it is.

    Guarantee: the folder ``adapter`` in the returned one is (``search.epsilon``, delta)-DP under adding or removing one
    unit on its side of the split. Private: the records. Secret: the working folder beside it, and how long it took.

    Returns: the search's folder; ``RunFolder.results`` in it holds what may be told. Where every candidate failed, that
        is that nothing was released, and that the budget is spent.

    Raises: ConfigError and DataError before anything is charged; SearchError if something else stopped it.
    """
    check_search(settings)
    check_records(settings)
    refuse_paid(settings)  # before the model is read and any noise is calibrated
    out, about = folder_of(settings), about_records()
    private_directory(SEARCH)
    try:
        return _search(settings, tune_settings(settings, str(about["label"]), device), about, out)
    except ConfigError as error:
        raise in_the_file(error, settings) from None


def _search(settings: Settings, chosen: TuneSettings, about: dict[str, Any], out: Path) -> Path:
    _, model = model_of(settings)
    base = open_base(model.source, chosen, model.revision)
    sides = read_sides(settings)
    unit = None if settings.data.unit == RECORD else settings.data.unit
    prepared = prepare_sides(sides, base, chosen, unit)
    for note in prepared.notes:
        _log.warning("%s", note)
    if settings.search.rehearses:
        with working_in(out):  # of two at once, the later rehearsal would replace that of the earlier's run
            _by_rehearsal(settings, sides, prepared, about, out)
    elif (told := _by_selection(settings, prepared, about, out)) is not None:
        write_json(RunFolder(out).results, told)
        forget_times(out)
    return out


def _by_selection(settings: Settings, prepared: PreparedRun, about: dict[str, Any], out: Path) -> dict[str, Any] | None:
    """Search among private candidates. Returns what may be told; None where that is kept already."""
    try:
        tuned = _best(settings, prepared, out, Register(SPENT))
    except NoWinnerError as error:
        _log.warning("%s", error)
        certificate = read_certificate(out / FILE)
        score = {"on": certificate.score.on, "units": certificate.score.units}
        return told_of_nothing(settings, prepared, about, certificate.certified, score)
    return None if RunFolder(out).results.exists() else told_of(settings, prepared, tuned, about)


def _by_rehearsal(settings: Settings, sides: Sides, prepared: PreparedRun, about: dict[str, Any], out: Path) -> None:
    """Rehearse, run the winner once on the private records, keep what may be told, and then check the ranking.

    Each step is on disk before the next begins, and a call that was stopped goes on there: nothing is chosen, run or
    counted again. A run that diverged has ended: it is not resumed, though with other noise it might end well.
    """
    register, results = Register(SPENT), RunFolder(out).results
    known = read_json(results) if results.exists() else {}
    told_too = runs_within(out) if settings.search.check_ranking or "ranking" in known else []
    for warning in paid_before(register, prepared, out, *told_too):  # before the rehearsal, which takes long
        _log.warning("%s", warning)
    if settings.search.check_ranking:
        check_held_out(prepared)
    if not known.get("rehearsed", True):
        problem = f"is {settings.search.name}, whose search has ended, and was not a rehearsal"
        raise ConfigError("search.name", problem, fix="give another name, or restore the score of that search")
    found, on = _rehearsed(settings, sides, prepared, out)

    def prepare(own: TuneSettings) -> PreparedRun:
        return prepare_sides(sides, prepared.base, own, None if settings.data.unit == RECORD else settings.data.unit)

    chosen = prepare(found.settings)
    rehearsal = {"tried": [[options, str(perplexity)] for options, perplexity in found.tried], "rehearsed_on": on}
    if not known.get("released", True):
        check_ended(chosen, out)
        _log.warning("%s: %s", out, _DIVERGED)
        return
    if (tuned := unless_diverged(chosen, out, lambda: run_once(chosen, out, register))) is None:
        _log.warning("%s: %s", out, _DIVERGED)
        plan = prepare(found.settings)  # training moves what some mechanisms are set to
        cost = price(plan.mechanism.mechanism, plan.schedule.priced, plan.mechanism.renyi_filter)
        write_json(results, told_of_nothing(settings, chosen, about, cost.certified, {"on": "rehearsal"}) | rehearsal)
        return
    told = known or told_of(settings, chosen, tuned, about) | rehearsal
    if not known:
        write_json(results, told)
    if settings.search.check_ranking and "ranking" not in told:
        trained = rank_privately(found, tuned, lambda one: prepare(settings_of(prepared.settings, one)), register)
        told = told | {"ranking": trained}
        write_json(results, told)
    forget_losers(out, ended="ranking" in told)


def _rehearsed(settings: Settings, sides: Sides, prepared: PreparedRun, out: Path) -> tuple[Rehearsed, str]:
    """The rehearsal, and what pages call the records that it read: all public."""
    base, chosen, asked, units = prepared.base, prepared.settings, settings.search.asked, len(prepared.units)
    if settings.search.rehearse_on == "public":
        return rehearsed(public_source(sides), base, chosen, asked, units, out, _say_rehearsed), PUBLIC
    kind, seed = prepared.units.kind, settings.search.twin_seed
    template = settings.data.template
    twin, column = twin_source(units, kind, seed, template), None if kind == RECORD else UNIT
    found = rehearsed(twin, base, chosen, asked, units, out, _say_rehearsed, column, {"twin_seed": seed, "unit": kind})
    return found, twin_name(units, kind, seed)


def _best(settings: Settings, prepared: PreparedRun, out: Path, register: Register) -> Tuned:
    asked = settings.search.asked
    for warning in register.warnings(prepared.fingerprint, id_of(out), again=asked.again):
        _log.warning("%s", warning)
    with _silent() as start:
        return search(prepared, asked, out, register, start)


@contextmanager
def _silent() -> Iterator[Callable[[SearchCertificate], None]]:
    """Context in which nothing of a candidate is said; yields what the search calls once its plan is fixed.

    Log lines, warnings, whatever is printed and any error after the plan go to the owner's file of failures: their
    times, their number and the names in them follow the candidates.
    """
    root, started, printed = logging.getLogger(), [], ExitStack()
    before = list(root.handlers)

    def start(certificate: SearchCertificate) -> None:
        _log.info("searching within epsilon %s; %s", at_most(certificate.certified, 4), _SECRET)
        started.append(certificate)
        root.handlers[:] = [_OwnersFile()]
        logging.captureWarnings(True)
        printed.enter_context(_printing_to_owner())

    try:
        with printed:
            yield start
    except NoWinnerError:
        raise
    except Exception as error:
        if not started:
            raise
        keep_failure(error)
        fix = f"look into {FAILURES}, mend the cause, and run again: it goes on with the same plan"
        raise SearchError(f"the search stopped on the way. Fix: {fix}.") from None
    finally:
        if started:
            logging.captureWarnings(False)
            root.handlers[:] = before


@contextmanager
def _printing_to_owner() -> Iterator[None]:
    """Context in which all that this process prints goes to the owner's file, by whatever code: some libraries log past
    the root logger, or write from compiled code."""
    descriptor = os.open(FAILURES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
    streams = (sys.stdout, sys.stderr)
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            for number, stream in zip((1, 2), streams, strict=True):
                stream.flush()
                os.dup2(descriptor, number)
            yield
    finally:
        for number, stream, own in zip((1, 2), streams, kept, strict=True):
            stream.flush()
            os.dup2(own, number)
            os.close(own)


class _OwnersFile(logging.Handler):
    """Adds log lines to the owner's file of failures."""

    def emit(self, record: logging.LogRecord) -> None:
        """Add one line."""
        keep_text(f"{self.format(record)}\n")


def _say_rehearsed(configuration: dict[str, Any], perplexity: float) -> None:
    named = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in configuration.items()
    )
    _log.info("rehearsed: %s: perplexity %.4g", named, perplexity)


def main(
    device: Annotated[str | None, typer.Option(help="cpu, or cuda:0")] = None,
    params: Annotated[Path, typer.Option(help="the parameter file")] = Path("params.yaml"),
    overrides: Annotated[str, typer.Option(help="sections to merge over it, as JSON")] = "{}",
    expect: Annotated[str, typer.Option(help="digest of the settings that the flow read")] = "",
    wait: Annotated[bool, typer.Option(help="wait for another such process that works on this search")] = False,
) -> None:
    """Search the pipeline's records by params.yaml."""
    settings = load_settings(params, json.loads(overrides))
    if expect and digest_of(settings) != expect:
        # On a cluster this may begin hours after the flow, or once more: an edited file would begin another search.
        raise ConfigError(str(params), "has changed since this search was asked for", fix="run it again")
    with _turn(settings.search.name) if wait else nullcontext():
        search_records(settings, device)


@contextmanager
def _turn(name: str) -> Iterator[None]:
    """Context in which no other worker of a cluster works on the search; waits for one that ends."""
    lock = private_directory(SEARCH) / f".{name}.worker.lock"
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock))
        except DptuneError:
            _log.warning("another process works on this search: waiting until it ends")
            held.enter_context(locked(lock, wait=True))
        yield


# The records that a search reads: the sides of the split before any canary was planted, and the public records.


_MADE_BY = {TRAIN_SIDE: "split", EVAL: "split", ATTACK_SIDE: "split", PUBLIC_VALIDATION: "validation"}


def check_records(settings: Settings) -> None:
    """Raise DataError for a file that no stage made yet, ConfigError for one that was split by another unit."""
    for file, stage in _MADE_BY.items():
        if not file.is_file():
            raise DataError(f"is missing: the stage {stage} makes it", fix=f"run `dvc repro {stage}`", file=file)
    for file in (TRAIN_SIDE, EVAL, ATTACK_SIDE):
        if (unit := read_about(file).get("unit")) != settings.data.unit:
            problem = f"is {settings.data.unit}, and {file} was split by {unit}"
            raise ConfigError("data.unit", problem, fix="run `dvc repro split`, or use that unit")


def read_sides(settings: Settings) -> Sides:
    """All records of a search. Private, but for ``public``.

    Raises: DataError for unreadable files; ConfigError if candidates would be scored on units that also train.
    """
    read = split_records
    sides = Sides(read(TRAIN_SIDE), eval=read(EVAL), public=read(PUBLIC_VALIDATION))
    shared = sides.shared_units
    if settings.data.unit != RECORD and settings.search.asked.score.on == "held_out" and shared:
        some = "some" if settings.experiment.telemetry == "private" else shared
        problem = f"is noisy, and {some} units have records on both sides of the split"
        raise ConfigError("search.score", problem, fix="use public, or {on: train}, or another data.parts")
    return replace(sides, test=split_records(ATTACK_SIDE))


def about_records() -> dict[str, Any]:
    """The public description of the records."""
    return read_about(TRAIN_SIDE)


def public_source(sides: Sides) -> RecordSource:
    """The public records as the library reads rows, for rehearsals."""
    return RecordSource((), public=[_row(record.content) for record in sides.public])


def _row(content: Content) -> dict[str, Any]:
    match content:
        case Text(text):
            return {"text": text}
        case PromptTarget(prompt, target):
            return {"prompt": prompt, "completion": target}
        case Chat(messages, inputs, prompt):
            if prompt:
                return {"prompt": list(messages[:prompt]), "completion": list(messages[prompt:]), **inputs}
            return {"messages": list(messages), **inputs}
    raise ConfigError("search.score", "rehearsal has no classifiers yet", fix="use noisy")


if __name__ == "__main__":
    run_command(main)
