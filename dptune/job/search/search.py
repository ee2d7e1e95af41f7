"""A private search: the best of a random number of candidates, and nothing of the others.

    kinds        every kind of candidate is built and priced                     public
    weights      opened, and a candidate's gradients rehearsed                   public
    plan         K and the candidates, drawn once, on disk before all else       secret
    certificate  first line: law, space, kinds, score, commitment                public
    register     the search counts as spent from here on                         the owner's
    candidates   trained and scored, each from its own ledger and a journal      secret
    winner       the largest score; second line; one rename publishes it         public

The working folder lies beside the result (mode 0700) and goes when the winner is out.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import forget_times, fsync_directory, locked, private_directory, sha256, write_json, write_text
from dptune.job.base_model import Base
from dptune.job.delivery.adapter_loading import with_trained
from dptune.job.delivery.deliverable import deliver
from dptune.job.delivery.verification import check_deliverable
from dptune.job.delivery.weights import partial_of, weights_file
from dptune.job.path_checks import check_folder
from dptune.job.preparation import PreparedRun, prepare
from dptune.job.result import Figures
from dptune.job.run import Tuned, figures_of, result_of, spec_of, tuned_of
from dptune.job.search.candidates import (
    CANDIDATES,
    SearchRun,
    check_winner,
    crashed,
    end_ledger,
    prepared_candidate,
    run_candidates,
    score_of,
)
from dptune.job.search.kinds import CandidateKind, price_kinds, score_terms
from dptune.job.search.plan import FIX, PLAN, Drawn, Journal, LostError, Plan, asked_of, changes
from dptune.job.search.score import best_of
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.mechanisms.versions import VERSIONS, check_versions
from dptune.privacy.certificate import (
    FILE,
    SCORE_LEDGER,
    ScoreTerms,
    SearchCertificate,
    Winner,
    discard_torn_line,
    read_certificate,
    write_certificate,
    write_winner,
)
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.spent_budgets.booking import write_booking
from dptune.privacy.spent_budgets.register import Register
from dptune.records.reading.source import RecordSource
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.run_start import rehearse_run

_log = logging.getLogger(__name__)


class NoWinnerError(DptuneError):
    """Every candidate failed: the base model is the result, and the budget is spent."""


def working_folder(out: Path) -> Path:
    """The secret folder of a search whose result goes to ``out``."""
    return RunFolder(out).searching


#: The kinds of candidates with their noise, and the score's.
Priced = tuple[tuple[CandidateKind, ...], ScoreTerms]


def search(
    prepared: PreparedRun,
    asked: SearchSettings,
    out: Path,
    register: Register,
    on_start: Callable[[SearchCertificate], None] = lambda certificate: None,
) -> Tuned:
    """Run a search, or go on with the one that ``out`` belongs to; a finished one is only loaded.

    Guarantee: the delivered folder is (``certificate.certified``, delta)-DP under adding or removing one unit on its
    side of the split, for who sees that folder alone. Secret: the working folder, the number of candidates, and how
    long the search took, which this function cannot hide.

    Raises: ConfigError before anything is charged; NoWinnerError if every candidate failed.
    """
    out = out.absolute()
    check_folder(out, "search")
    check_prepared(prepared, asked)
    priced = None
    if not (out.exists() or working_folder(out).exists()):  # a search that is refused leaves no folder
        register.check(prepared.fingerprint, again=asked.again)  # asked again when locked
        priced = plan_of_search(prepared, asked)
    folder, working = RunFolder(out), working_folder(out)
    weights = None if _has_ended(folder) else _rehearsed_weights(prepared)
    with locked(private_directory(out) / folder.lock.name):
        check_folder(out, "search")  # again: a run may have begun in between
        cell = _check_same(prepared, asked, folder)
        if weights is None or _has_ended(folder):
            _forget(working, out, asked)  # a process may have been killed after the winner was delivered
            # Again, for somebody may have removed the entry since.
            _book(prepared, out, register, read_certificate(_certificate_of(folder)), again=True)
            return _load(prepared, out)
        plan, certificate = _open(prepared, asked, out, register, priced, cell)
        on_start(certificate)
        with _quiet():
            shared = SearchRun.open(prepared, plan, certificate, working, weights)
            for start in range(0, len(plan.candidates), asked.together):
                run_candidates(shared, plan.candidates[start : start + asked.together])
        # Without the losers nobody asks why, and a line about one tells that there was another.
        if asked.keep_losers and any(crashed(shared, candidate) for candidate in plan.candidates):
            _log.warning("a candidate crashed and counts as the worst: the guarantee assumes that no record does that")
        best = best_of([score_of(shared, candidate) for candidate in plan.candidates])
        if best is not None:
            model = _publish(shared, plan.candidates[best], working, out)
        else:  # the certificate alone says that nothing is published
            model = None
            if not read_certificate(working / FILE).complete:
                write_winner(working / FILE, None)
            _copy(working / FILE, out / FILE)
        _forget(working, out, asked)
        return _load(prepared, out, model)


def _has_ended(folder: RunFolder) -> bool:
    return folder.adapter.exists() or (folder.path / FILE).exists()


def _certificate_of(folder: RunFolder) -> Path:
    """The certificate of a search that has ended: beside its winner, or alone."""
    return next((path for path in (folder.adapter / FILE, folder.path / FILE) if path.exists()), folder.adapter / FILE)


def _rehearsed_weights(prepared: PreparedRun) -> Any:
    """The base model, after a candidate's gradients were computed on it: a plan that none can train would be paid for.

    Raises: ConfigError as ``Base.load`` and ``rehearse_run``.
    """
    weights = prepared.base.load()
    _ = prepared.base.named  # of what was loaded: once for all candidates
    rehearse_run(spec_of(prepared, shared_copy(weights), prepared.header))
    return weights


def id_of(out: Path) -> str:
    """The id of the search in ``out``, under way or ended; empty if none was started."""
    working, folder = working_folder(out), RunFolder(out.absolute())
    if _has_ended(folder):
        return read_certificate(_certificate_of(folder)).id
    return Plan.read(working).id if (working / PLAN).exists() else ""


@contextmanager
def _quiet() -> Iterator[None]:
    """Context in which this library logs nothing: a line for each candidate would tell how many there are."""
    log = logging.getLogger("dptune")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def prepare_search(source: RecordSource, base: Base, settings: TuneSettings, asked: SearchSettings) -> PreparedRun:
    """Read the records for a search, which holds units out only to score by them. Raises: as ``prepare``."""
    by_units = asked.score.on == "held_out"
    return prepare(source, base, settings if by_units else replace(settings, eval_share=0.0), scored=by_units)


def check_prepared(prepared: PreparedRun, asked: SearchSettings) -> None:
    """Raise ConfigError for a score that has nothing to be computed from."""
    if asked.score.on == "public" and prepared.public is None:
        raise ConfigError("public", "is missing, and score: public needs public records", fix="give them, or noisy")
    if asked.score.on == "held_out" and (prepared.held_out is None or len(prepared.held_out) < 2):
        problem = "leaves fewer than two units held out, and they score the candidates"
        raise ConfigError("eval_share", problem, fix="raise it, or score on train")


def plan_of_search(prepared: PreparedRun, asked: SearchSettings) -> Priced:
    """The priced kinds and the score's noise, before anything is drawn. Raises: ConfigError."""
    units = {"held_out": prepared.held_out, "train": prepared.units}.get(asked.score.on)
    count = len(units) if units is not None else len(prepared.public.rows) if prepared.public is not None else 0
    terms = score_terms(asked, prepared.settings.epsilon, prepared.schedule.delta, count)
    own = terms.release if terms.on == "train" else None
    public = prepared.public is not None
    kinds = price_kinds(asked, prepared.settings, prepared.base, len(prepared.units), own, public=public)
    return kinds, terms


def planned_certificate(prepared: PreparedRun, asked: SearchSettings) -> SearchCertificate:
    """What the search would promise; nothing is drawn, written or charged. Raises: ConfigError."""
    check_prepared(prepared, asked)
    return certificate_of(prepared, asked, *plan_of_search(prepared, asked), identity="planned", fixed="")


def certificate_of(
    prepared: PreparedRun,
    asked: SearchSettings,
    kinds: tuple[CandidateKind, ...],
    terms: ScoreTerms,
    identity: str,
    fixed: str,
) -> SearchCertificate:
    """The first line of the certificate. Raises: ConfigError if the search does not meet its budget after all."""
    found = SearchCertificate(
        id=identity,
        epsilon=prepared.settings.epsilon,
        delta=prepared.schedule.delta,
        unit=prepared.units.kind,
        units=len(prepared.units),
        data=prepared.settings.called,
        telemetry=prepared.settings.telemetry,
        law=asked.law,
        bound=asked.bound,
        space=asked.space.to_json(),
        kinds=tuple((kind.weight, tuple(kind.releases.items())) for kind in kinds),
        score=terms,
        commitment=fixed,
        # The plug-ins of all kinds: a loser's bounds and noise are part of what is promised.
        plugins=tuple(sorted({plugin for kind in kinds for plugin in kind.plugins})),
    )
    if not found.certified <= prepared.settings.epsilon:
        problem = f"the search would cost {at_most(found.certified, 4)} of {prepared.settings.epsilon:g}"
        raise ConfigError("epsilon", problem, fix="raise it, or expect fewer candidates")
    return found


def _open(
    prepared: PreparedRun,
    asked: SearchSettings,
    out: Path,
    register: Register,
    priced: Priced | None,
    cell: dict[str, Any],
) -> tuple[Plan, SearchCertificate]:
    """The plan and certificate of a new search, ``priced`` if that was done, or those of the one that is under way.

    Args:
        cell: what is written of the search into its folder. From then on, files that are gone raise LostError.

    Raises: LostError if files of a search that was under way are gone; it is not begun again.
    """
    working, known = working_folder(out), RunFolder(out).cell
    if working.exists() and working.stat().st_mode & 0o077:
        fix = f"find out who read it; then `chmod 700 {working}`"
        raise ConfigError("out", f"{working} can be read by others, and holds what must stay secret", fix=fix)
    discard_torn_line(working / FILE)
    has_plan, has_certificate = (working / PLAN).exists(), (working / FILE).exists()
    if has_certificate and not has_plan:
        problem = f"{working} has a certificate and no plan: its search cannot go on, and counts as spent"
        raise ConfigError("out", problem, fix=FIX)
    if has_plan and has_certificate:
        plan, certificate = Plan.read(working), read_certificate(working / FILE)
        if certificate.commitment != plan.commitment or certificate.id != plan.id:
            raise ConfigError("out", f"{working} holds the plan of another search", fix="restore its own plan")
        _check_plan(prepared, asked, plan, working)
        # Killed before the register's line, others may have paid since. It adds nothing twice.
        _book(prepared, out, register, certificate, again=asked.again)
        write_json(known, cell)
        return plan, certificate
    if known.exists() or any((working / CANDIDATES).glob("*/*")):  # booked, or a candidate began
        lost = next(path for path in (working, working / PLAN, working / FILE) if not path.exists())
        raise LostError(lost, "is missing, and a search began here")
    register.check(prepared.fingerprint, again=asked.again)
    kinds, terms = priced or plan_of_search(prepared, asked)
    private_directory(working)
    private_directory(working / CANDIDATES)  # now: others see the number and the times of what lies in ``working``
    plan = Plan.draw(asked, kinds, OsEntropy())
    plan = replace(plan, asked=asked_of(prepared, asked, plan.salt))
    certificate = certificate_of(prepared, asked, kinds, terms, plan.id, plan.commitment)
    plan.write(working)
    Journal.create(working, plan.id)
    write_certificate(working / FILE, certificate)
    write_json(known, cell)
    try:
        _book(prepared, out, register, certificate, again=asked.again)
    except DptuneError:
        known.unlink()
        shutil.rmtree(working)  # nothing ran yet
        raise
    return plan, certificate


def _book(prepared: PreparedRun, out: Path, register: Register, certificate: SearchCertificate, *, again: bool) -> None:
    """Count the search in the register, once, and say in its folder that it does."""
    write_booking(out, prepared.fingerprint, register.path)
    register.add_search(prepared.fingerprint, certificate, again=again)


def _check_plan(prepared: PreparedRun, asked: SearchSettings, plan: Plan, working: Path) -> None:
    """Raise ConfigError unless the plan was drawn for these records and settings: its price is about those alone."""
    if not plan.asked:
        problem = f"{working} holds a search whose plan does not say for which records and settings it was drawn"
        raise ConfigError("out", problem, fix="give another folder, which spends again")
    now = asked_of(prepared, asked, plan.salt)
    if VERSIONS in plan.asked:  # earlier versions kept them only in the cell, which may be lost
        check_versions(plan.asked, now[VERSIONS], working, ended=False)
    if changed := changes(plan.asked, now):
        problem = f"{working} holds a search that was started with other settings ({changed})"
        raise ConfigError("out", problem, fix="restore them, or give another folder, which spends again")


def _check_same(prepared: PreparedRun, asked: SearchSettings, folder: RunFolder) -> dict[str, Any]:
    """What the search is asked for, for its cell; where one goes on or ended, check that it is the same.

    Raises: ConfigError naming what changed, of settings, records or the versions of parts.
    """
    known = folder.settings
    salt = known.get("salt") or secrets.token_hex(16)
    now = asked_of(prepared, asked, salt) | {"salt": salt, "kind": "search"}
    begun = (working_folder(folder.path) / PLAN).exists() or _has_ended(folder)
    if known and begun and (changed := changes(known | {"kind": "search"}, now)):
        problem = f"{folder.path} was started with other settings ({changed})"
        raise ConfigError("out", problem, fix="restore them, or give another folder, which spends again")
    if known and begun:
        check_versions(known, now[VERSIONS], folder.path, ended=_has_ended(folder))
    return now


def _publish(shared: SearchRun, winner: Drawn, working: Path, out: Path) -> Any:
    """Put the winner's folder at its place, with the certificate. Returns its model if it was loaded, else None."""
    folder, model = shared.folder_of(winner), None
    if not folder.adapter.exists():
        check_winner(shared, winner)
        end_ledger(folder.ledger)
        partial, own = partial_of(folder), prepared_candidate(shared, winner)
        score = score_of(shared, winner)
        if not read_certificate(working / FILE).complete:
            chain = read_ledger(folder.ledger).chain
            write_winner(working / FILE, Winner(winner.options, sha256(weights_file(partial)), chain, score))
        _copy(working / FILE, partial / FILE)
        if (charged := folder.path / SCORE_LEDGER).exists():
            _copy(end_ledger(charged), partial / SCORE_LEDGER)
        before, after, model = _public_figures(shared, own, partial)
        result = result_of(own, before, after, read_ledger(folder.ledger), read_certificate(working / FILE))
        result = replace(result, search={"score": score, "on": shared.terms.on})
        result.write(RunFolder(out).result)
        deliver(folder, result)
    check_deliverable(folder.adapter)  # before all that it was made of goes
    folder.adapter.rename(RunFolder(out).adapter)
    fsync_directory(out)  # durable before what it was made of goes
    return model


def _copy(source: Path, target: Path) -> None:
    write_text(target, source.read_text(encoding="utf-8"))


def _public_figures(shared: SearchRun, own: PreparedRun, partial: Path) -> tuple[Figures, Figures, Any]:
    """Figures on public records before and after, and the model; held-out records' own are never computed."""
    if own.public is None:
        return {}, {}, None
    quiet = replace(own, settings=replace(own.settings, telemetry="private"))
    # A classifier begins with a new head, which the shared weights lack.
    new = own.settings.task == "classify"
    start = spec_of(quiet, own.base.load(), own.header).model if new else shared.weights
    before = figures_of(quiet, start)
    del start  # on its device beside the winner it would be one model too many
    model = with_trained(own.base.load(), partial)
    return before, figures_of(quiet, model), model


def _forget(working: Path, out: Path, asked: SearchSettings) -> None:
    """Remove the losers, and the times of what stays: when a search ended tells how many candidates there were."""
    if working.exists() and not asked.keep_losers:
        shutil.rmtree(working)
    forget_times(out)


def _load(prepared: PreparedRun, out: Path, model: Any = None) -> Tuned:
    """The ended search, with its winner's model, which is loaded unless it is given."""
    folder = RunFolder(out)
    if not folder.adapter.exists():
        problem = f"{out}: every candidate failed, so the base model is the result, and the budget is spent"
        raise NoWinnerError(f"{problem}. Fix: lower the learning rates of the space; another search adds its cost.")
    contents = check_deliverable(folder.adapter)
    certificate = read_certificate(folder.adapter / FILE)
    if model is None:
        model = with_trained(prepared.base.load(), folder.adapter)
    return tuned_of(model.eval(), contents, out, certificate)
