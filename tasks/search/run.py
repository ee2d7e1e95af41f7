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
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.corpus.reading.read import Sides
from dptune.digits import at_most
from dptune.errors import ConfigError, DptuneError
from dptune.files import PRIVATE_FILE, forget_times, locked, private_directory, read_json, write_json
from dptune.mechanisms.planning import price
from dptune.privacy.certificate import FILE, SearchCertificate, read_certificate
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.runs_within import runs_within
from dptune.privacy.spent import Register
from dptune.tuning.base import open_base
from dptune.tuning.card import PUBLIC
from dptune.tuning.prepare import PreparedRun, prepare_sides
from dptune.tuning.run import Tuned, paid_before, working_in
from dptune.tuning.run import run_here as run_once
from dptune.tuning.search.kinds import settings_of
from dptune.tuning.search.rehearsal import Rehearsed, rehearsed
from dptune.tuning.search.search import NoWinnerError, id_of, search
from dptune.tuning.settings import TuneSettings
from dptune.units import RECORD
from tasks.paths import FAILURES, SEARCH, SPENT
from tasks.search.asked import check_search, digest_of, folder_of, in_the_file, model_of, tune_settings
from tasks.search.before import refuse_paid
from tasks.search.outcome import check_ended, forget_losers, unless_diverged
from tasks.search.ranking import check_held_out, rank_privately
from tasks.search.records import about_records, check_records, public_source, read_sides
from tasks.search.told import told_of, told_of_nothing
from tasks.search.twin import UNIT, twin_name, twin_source
from tasks.settings.params import Settings, load_settings
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
        problem = f"is {settings.search.name}, whose search has ended, and was no rehearsal"
        raise ConfigError("search.name", problem, fix="give another name, or take the score of that search back")
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
    twin, column = twin_source(units, kind, seed), None if kind == RECORD else UNIT
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


if __name__ == "__main__":
    run_command(main)
