"""Trains and scores the candidates of a search, some at a time over one frozen base.

A candidate is a run of its own: ledger, noise, coins, controller, checkpoint. What becomes of one never follows from
how many there are, for the price holds for candidates that are independent and alike whatever their number. So every
pass, of several candidates or of one, has the same rule:

    an error of the candidate's own     counts at once, with the worst score. Resumed, it might win by fresh noise
    an error of the pass                the candidate goes on alone, once; a crash that repeats then counts
    memory that is full, a GPU's fault  the same; the second time it ends the search, which goes on later
    disk, ledger, settings              end the search, which goes on later

A candidate that failed is never drawn again: that would condition the law of their number on success. Nor is one whose
files were removed; see ``plan``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dptune.core.errors import DivergedError, DptuneError, FullDeviceError, is_of_device, is_out_of_memory
from dptune.core.files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    DamagedFileError,
    fsync_directory,
    private_directory,
    sha256,
)
from dptune.job.delivery.deliverable import write_weights
from dptune.job.delivery.weights import partial_of
from dptune.job.preparation import PreparedRun
from dptune.job.run import spec_of
from dptune.job.run_spec import schedule_of
from dptune.job.search.kinds import build_mechanism, candidate_schedule, settings_of
from dptune.job.search.plan import Drawn, Journal, LostError, Plan, PlanError
from dptune.job.search.score import Array, draw_noise, noisy_score, unit_losses
from dptune.mechanisms.planning import Calibrated, planned
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.certificate import SCORE_LEDGER, ScoreTerms, SearchCertificate, exceeds
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, discard_unborn, is_complete, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder, read_acknowledged, witnessed_releases
from dptune.privacy.run_header import RunHeader
from dptune.training.checkpoints import CheckpointError
from dptune.training.data import Tokens
from dptune.training.evaluation import mean_loss
from dptune.training.gradients.shared_pass import rehearse_pass, shared_copy, train_together
from dptune.training.loop import train
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run import Run
from dptune.training.run_start import open_run
from dptune.training.spec import RunSpec

_CRASH = "crash: "
#: Errors that follow from a candidate's own releases.
_OWN = (DivergedError, BudgetError)
_DISK = (OSError, LedgerError, CheckpointError, DamagedFileError, PlanError)
Kinds = tuple[tuple[float, tuple[tuple[Release, int], ...]], ...]
#: Folder of the candidates within the working folder, whose own number of links and times every user can read.
CANDIDATES = "candidates"


@dataclass(frozen=True)
class SearchRun:
    """What all candidates of a search share. Private.

    Attributes:
        weights: the frozen base model.
        before: (units,) losses of the base model where scores are noisy; None where they are public.
        scored: the records and units that scores are about, where they are noisy.
        kinds: kinds of the certificate; no candidate may release more than its kind.
    """

    prepared: PreparedRun
    plan: Plan
    terms: ScoreTerms
    folder: Path
    journal: Journal = field(repr=False)
    weights: Any = field(repr=False)
    scored: tuple[Tokens, PrivacyUnits] | None = field(repr=False)
    before: Array | None = field(repr=False)
    kinds: Kinds = ()

    @classmethod
    def open(
        cls, prepared: PreparedRun, plan: Plan, certificate: SearchCertificate, folder: Path, weights: Any
    ) -> SearchRun:
        """Compute the base model's losses on the units that score."""
        scored = scored_units(prepared, terms := certificate.score)
        before = None if scored is None else unit_losses(weights, *scored, prepared.plan.physical_batch_size)
        journal = Journal(folder, plan.id)
        return cls(prepared, plan, terms, folder, journal, weights, scored, before, certificate.kinds)

    def folder_of(self, candidate: Drawn) -> RunFolder:
        """The working folder of a candidate."""
        return RunFolder(self.folder / CANDIDATES / candidate.name)


def scored_units(prepared: PreparedRun, terms: ScoreTerms) -> tuple[Tokens, PrivacyUnits] | None:
    """The records and units that a noisy score is about; None for a public score."""
    if terms.on == "held_out":
        assert prepared.evaluation is not None
        assert prepared.held_out is not None
        return prepared.evaluation, prepared.held_out
    return (prepared.tokens, prepared.units) if terms.on == "train" else None


def prepared_candidate(shared: SearchRun, candidate: Drawn) -> PreparedRun:
    """The run of one candidate, with a mechanism of its own.

    Raises: PlanError if it would release more than the certificate prices.
    """
    prepared = shared.prepared
    settings = settings_of(prepared.settings, candidate.options)
    schedule = candidate_schedule(settings, prepared.base, len(prepared.units))
    noise = shared.plan.kinds[candidate.kind][1]
    kind = shared.kinds[candidate.kind][1]
    made = build_mechanism(settings, prepared.base, schedule, noise)
    mechanism = Calibrated(replace(made, dealt_by=kind[0][0].dealt_by))  # "rank" in a search of an earlier version
    if exceeds(planned(mechanism.mechanism, schedule.priced), kind):
        problem = f"{shared.folder}: a candidate would release more than the certificate prices"
        raise PlanError(f"{problem}. Fix: restore plan and certificate, or give another folder, which spends again.")
    units, base = len(prepared.units), prepared.base
    trained = schedule_of(settings, units, base.parameters, base.positions, made.bands)
    return replace(prepared, settings=settings, schedule=trained, mechanism=mechanism)


def run_candidates(shared: SearchRun, candidates: Sequence[Drawn]) -> None:
    """Train and score candidates until each has an outcome.

    Raises: OSError, and DptuneError such as FullDeviceError, which are the machine's or the settings' and no
        candidate's; KeyboardInterrupt when stopped. The search then goes on from what is on disk.
    """
    waiting = [candidate for candidate in candidates if _outcome(shared, candidate) is None]
    again: set[tuple[str, bool]] = set()  # candidates whose pass failed once, and whether a GPU did
    settings = shared.prepared.settings
    if len(waiting) > 1 and settings.task == "generate" and settings.train == "lora":
        _train_shared(shared, waiting, again)
    for candidate in waiting:
        while _outcome(shared, candidate) is None:
            _train_alone(shared, candidate, again)


def score_of(shared: SearchRun, candidate: Drawn) -> float:
    """The score of a candidate with an outcome; -inf where it failed."""
    outcome = _outcome(shared, candidate)
    assert outcome is not None
    return -math.inf if outcome["score"] is None else float(outcome["score"])


def crashed(shared: SearchRun, candidate: Drawn) -> bool:
    """Whether the candidate failed by an error that is no function of its releases."""
    outcome = _outcome(shared, candidate)
    return outcome is not None and outcome["why"].startswith(_CRASH)


def _outcome(shared: SearchRun, candidate: Drawn) -> dict[str, Any] | None:
    return shared.journal.outcomes.get(candidate.name)


def _check_kept(shared: SearchRun, candidate: Drawn) -> None:
    """Check that a candidate without an outcome is what its process left, and nothing of it was removed since.

    Raises: LostError if a file is missing without which it would be drawn again; see ``plan``.
    """
    folder, begun = shared.folder_of(candidate), candidate.name in shared.journal.begun
    if not folder.has_begun:
        if begun:
            raise LostError(folder.ledger, "is missing or empty, and its candidate began: it would be drawn again")
        return
    contents = read_acknowledged(folder.ledger)
    if contents.complete or (contents.releases and not begun):
        raise LostError(
            shared.journal.path, f"lacks lines about {folder.path.name}, whose ledger holds what those lines say"
        )
    if contents.releases and not folder.checkpoint.exists():
        raise LostError(folder.checkpoint, f"is missing, and {contents.releases} releases made it")
    shared.journal.begin(candidate.name)


@contextmanager
def _begun(shared: SearchRun, candidate: Drawn) -> Iterator[None]:
    """Context in which the first line of a candidate's ledger is written; then the journal says so."""
    fsync_directory(shared.folder / CANDIDATES)  # or a power cut could leave the line and not the folder
    yield
    shared.journal.begin(candidate.name)


def _spec(shared: SearchRun, candidate: Drawn, own: PreparedRun) -> RunSpec:
    header = replace(own.header, search=shared.plan.id, run_id=candidate.name)
    on_failure, booked = partial(_count_own, shared, candidate), partial(_begun, shared, candidate)
    return replace(spec_of(own, shared_copy(shared.weights), header), on_failure=on_failure, booked=booked)


def _train_shared(shared: SearchRun, candidates: Sequence[Drawn], again: set[tuple[str, bool]]) -> None:
    """Train candidates in one pass. Who has no outcome then goes on alone."""
    begun: list[tuple[Drawn, PreparedRun, RunSpec, Run]] = []
    try:
        try:
            for candidate in candidates:
                _check_kept(shared, candidate)
                own = prepared_candidate(shared, candidate)
                spec, folder = _spec(shared, candidate, own), shared.folder_of(candidate)
                try:
                    run = open_run(spec, private_directory(folder.path), OsEntropy())
                except Exception as error:
                    _settle(shared, candidate, error, again)
                else:
                    begun.append((candidate, own, spec, run))
            runs = [run for *_, run in begun]
            rehearse_pass(shared.weights, runs)  # or those in company alone would pay for a step that is not made
            errors = train_together(shared.weights, runs)
        except _DISK:
            raise
        except Exception:  # of the pass as a whole, such as settings that cannot share one
            return
        for (candidate, own, spec, run), failed in zip(begun, errors, strict=True):
            try:
                if failed is not None:
                    raise failed
                _finish(shared, candidate, own, spec.model, run.ledger)
            except Exception as error:
                _settle(shared, candidate, error, again)
    finally:  # else a candidate could not go on, alone or after a kill in between
        for *_, run in begun:
            run.ledger.close()


def _train_alone(shared: SearchRun, candidate: Drawn, again: set[tuple[str, bool]]) -> None:
    folder = shared.folder_of(candidate)
    try:
        _check_kept(shared, candidate)
        own = prepared_candidate(shared, candidate)
        spec = _spec(shared, candidate, own)
        ledger = train(spec, private_directory(folder.path), OsEntropy())
        _finish(shared, candidate, own, spec.model, ledger)
    except Exception as error:
        _settle(shared, candidate, error, again)


def _finish(shared: SearchRun, candidate: Drawn, own: PreparedRun, model: Any, ledger: Ledger) -> None:
    """Write the weights, charge and draw the score, and end the ledger, in this order."""
    folder, base = shared.folder_of(candidate), own.base
    try:
        write_weights(model, base.tokenizer, folder, base.named, own.kept)
        for path in partial_of(folder).rglob("*"):  # some libraries write files that every user may read
            path.chmod(PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE)
        score = _score(shared, folder, model, own)
        shared.journal.end(candidate.name, score, "", _files(folder))
        ledger.finish()
    except Exception as error:
        _count_own(shared, candidate, error)
        raise
    finally:
        ledger.close()


def _files(folder: RunFolder) -> dict[str, str]:
    """The digest of every file that a candidate would deliver, by its name within the adapter's folder."""
    partial = partial_of(folder)
    return {str(path.relative_to(partial)): sha256(path) for path in sorted(partial.rglob("*")) if path.is_file()}


def check_winner(shared: SearchRun, candidate: Drawn) -> None:
    """Check that all of the winner is there: another candidate in its place would be another selection.

    Raises: LostError naming the first file that is missing, or is another than it was.
    """
    folder, outcome = shared.folder_of(candidate), _outcome(shared, candidate)
    assert outcome is not None
    score = folder.path / SCORE_LEDGER
    for path in (folder.ledger, *([score] if shared.terms.release is not None else [])):
        if not path.exists():
            raise LostError(path, "is missing, and the winner is delivered with it")
    # Before ``end_ledger``: a ledger that is ended says that there was no more.
    if read_acknowledged(folder.ledger).releases < witnessed_releases(folder.path):
        raise LostError(folder.ledger, "was cut: files beside it rely on more releases")
    if shared.terms.release is not None and not is_charged(score):
        raise LostError(score, "was cut: it lacks the charge of the winner's score")
    for name, digest in outcome["files"].items():
        path = partial_of(folder) / name
        if not path.is_file() or sha256(path) != digest:
            raise LostError(path, "is missing, or another than the winner's")


def _count_own(shared: SearchRun, candidate: Drawn, error: Exception) -> None:
    """Write the outcome of a candidate that failed by itself; nothing where machine or settings are at fault."""
    if isinstance(error, _OWN):
        shared.journal.end(candidate.name, None, str(error))
    elif not (isinstance(error, OSError | DptuneError) or is_of_device(error)):
        shared.journal.end(candidate.name, None, f"{_CRASH}{type(error).__name__}: {error}")


def _settle(shared: SearchRun, candidate: Drawn, error: Exception, again: set[tuple[str, bool]]) -> None:
    """Decide what an error that ended a candidate's pass means for it; see the module.

    Raises: ``error``, or FullDeviceError for it, where it ends the search.
    """
    if isinstance(error, _DISK):
        raise error
    attempt = (candidate.name, is_of_device(error))
    if attempt in again or isinstance(error, _OWN):
        _count_own(shared, candidate, error)
        if _outcome(shared, candidate) is None:
            raise (FullDeviceError() if is_out_of_memory(error) else error) from None
    again.add(attempt)


def _score(shared: SearchRun, folder: RunFolder, model: Any, own: PreparedRun) -> float | None:
    """The candidate's score; None for a score that is no number.

    The noise is drawn, and kept in the journal, before the charge. A process that dies after it leaves a candidate
    whose score is the same when it is made again: to lose it would lose the training too, and with fresh noise it would
    be another draw.

    Raises: LostError if the noise of a charged score is gone.
    """
    if shared.scored is None:
        assert own.public is not None
        loss = mean_loss(model, own.public, own.plan.physical_batch_size)
        return -loss if math.isfinite(loss) else None
    assert shared.before is not None
    tokens, units = shared.scored
    losses = unit_losses(model, tokens, units, own.plan.physical_batch_size)
    name, ledger, journal = folder.path.name, folder.path / SCORE_LEDGER, shared.journal
    if name not in journal.noise:
        if is_charged(ledger):
            problem = f"lacks the noise of a score that {ledger} has charged: with other noise it would be another draw"
            raise LostError(journal.path, problem)
        journal.keep_noise(name, draw_noise(OsEntropy()))
    charge_score(ledger, score_header(shared), shared.terms)
    return noisy_score(losses, shared.before, shared.terms, journal.noise[name])


def score_header(shared: SearchRun) -> RunHeader:
    """The header of the ledger of one score, which is about the units that score."""
    prepared = shared.prepared
    assert shared.scored is not None
    units = shared.scored[1]
    return RunHeader(
        mechanism="score",
        published_accountant="gdp_clt",
        accounting="certified",
        epsilon=None,
        delta=prepared.schedule.delta,
        unit=units.kind,
        units=len(units),
        data=prepared.settings.called,
        telemetry=prepared.settings.telemetry,
        search=shared.plan.id,
    )


def is_charged(path: Path) -> bool:
    """Whether the ledger of a score holds its release."""
    if path.exists():
        discard_unborn(path)
    return path.exists() and (is_complete(path) or read_ledger(path).releases > 0)


def charge_score(path: Path, header: RunHeader, terms: ScoreTerms) -> None:
    """Charge one score, once, and end its ledger, also that of a process that was killed in between."""
    release = terms.release
    assert release is not None
    if is_charged(path):
        end_ledger(path)
        return
    planned = Counter([release])
    with Ledger.resume(path, planned) if path.exists() else Ledger.create(path, header, planned) as ledger:
        ledger.charge(release)
        ledger.finish()


def end_ledger(path: Path) -> Path:
    """End a ledger whose process was killed after its last release, and return its path."""
    if not is_complete(path):
        Ledger.resume(path, Counter()).finish()
    return path
