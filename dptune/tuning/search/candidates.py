"""Trains and scores the candidates of a search, some at a time over one frozen base.

A candidate is a run of its own: ledger, noise, coins, controller, checkpoint. What fails in a pass that several share
is nobody's failure, so each of them then goes on alone; a candidate that fails alone counts, with the worst score, and
is never drawn again: that would condition the law of the number of candidates on success.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dptune.errors import DivergedError, FullDeviceError, is_out_of_memory
from dptune.files import PRIVATE_DIRECTORY, PRIVATE_FILE, private_directory, write_json
from dptune.mechanisms.planning import Calibrated, planned
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.certificate import SCORE_LEDGER, ScoreTerms, SearchCertificate, exceeds
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, discard_unborn, is_complete, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.training.checkpoints import CheckpointError
from dptune.training.data import PrivacyUnits, Tokens
from dptune.training.evaluation import mean_loss
from dptune.training.loop import train
from dptune.training.model import attach_lora
from dptune.training.opening import open_run
from dptune.training.run import Run
from dptune.training.spec import RunSpec
from dptune.training.together import shared_copy, train_together
from dptune.tuning.deliverable import write_weights
from dptune.tuning.prepare import PreparedRun, trained_schedule
from dptune.tuning.search.kinds import build_mechanism, candidate_schedule, settings_of
from dptune.tuning.search.plan import Drawn, Plan, PlanError
from dptune.tuning.search.score import Array, noisy_score, unit_losses
from dptune.tuning.weights import partial_of

_CRASH = "crash: "
Kinds = tuple[tuple[float, tuple[tuple[Release, int], ...]], ...]
OUTCOME = "outcome.json"
#: Folder of the candidates within the working folder, whose own number of links and times every user can read.
CANDIDATES = "candidates"


@dataclass(frozen=True)
class SearchRun:
    """What all candidates of a search share. Private.

    Attributes:
        weights: the frozen base model.
        before: (units,) losses of the base model where scores are noisy; None where they are public.
        scored: the records and units that scores are about, where they are noisy.
        kinds: of the certificate; no candidate may release more than its kind.
    """

    prepared: PreparedRun
    plan: Plan
    terms: ScoreTerms
    folder: Path
    weights: Any = field(repr=False)
    scored: tuple[Tokens, PrivacyUnits] | None = field(repr=False)
    before: Array | None = field(repr=False)
    kinds: Kinds = ()

    @classmethod
    def open(cls, prepared: PreparedRun, plan: Plan, certificate: SearchCertificate, folder: Path) -> SearchRun:
        """Load the base, and compute its losses on the units that score."""
        weights = prepared.base.load()
        scored = scored_units(prepared, terms := certificate.score)
        before = None if scored is None else unit_losses(weights, *scored, prepared.settings.rows)
        return cls(prepared, plan, terms, folder, weights, scored, before, certificate.kinds)

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
    mechanism = Calibrated(build_mechanism(settings, prepared.base, schedule, noise))
    if exceeds(planned(mechanism.mechanism, schedule.priced), shared.kinds[candidate.kind][1]):
        problem = f"{shared.folder}: a candidate would release more than the certificate prices"
        raise PlanError(f"{problem}. Fix: restore plan and certificate, or give another folder, which spends again.")
    trained = trained_schedule(settings, prepared.base, len(prepared.units), mechanism.mechanism)
    return replace(prepared, settings=settings, schedule=trained, mechanism=mechanism)


def run_candidates(shared: SearchRun, candidates: Sequence[Drawn]) -> None:
    """Train and score candidates until each has an outcome, together and then alone where the shared pass failed.

    Raises: OSError, FullDeviceError, LedgerError and CheckpointError, which are the machine's and not a candidate's;
        KeyboardInterrupt when stopped. The search then goes on from what is on disk.
    """
    waiting = [candidate for candidate in candidates if _outcome(shared, candidate) is None]
    if len(waiting) > 1 and shared.prepared.settings.task == "generate":
        _train_shared(shared, waiting)
    for candidate in waiting:
        if _outcome(shared, candidate) is None:
            _train_alone(shared, candidate)


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
    path = shared.folder_of(candidate).path / OUTCOME
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _spec(shared: SearchRun, candidate: Drawn, own: PreparedRun) -> RunSpec:
    base = own.base
    model = attach_lora(shared_copy(shared.weights), base.lora, own.settings.seed, base.head)
    header = replace(own.header, search=shared.plan.id, run_id=candidate.name)
    return RunSpec(model, own.tokens, own.units, own.mechanism.mechanism, own.plan, header, public=own.public)


def _train_shared(shared: SearchRun, candidates: Sequence[Drawn]) -> None:
    """Train candidates in one pass. What fails here has no outcome, and is tried alone."""
    runs: list[Run] = []
    specs = []
    try:
        try:
            for candidate in candidates:
                own = prepared_candidate(shared, candidate)
                spec = _spec(shared, candidate, own)
                folder = private_directory(shared.folder_of(candidate).path)
                runs.append(open_run(spec, folder, OsEntropy()))
                specs.append((candidate, own, spec))
            errors = train_together(shared.weights, runs)
        except (OSError, LedgerError, PlanError):
            raise
        except Exception:  # nobody's failure: each goes on alone
            return
        for run, (candidate, own, spec), error in zip(runs, specs, errors, strict=True):
            if error is None:
                _finish(shared, candidate, own, spec.model, run.ledger)
    finally:  # else a candidate could not go on, alone or after a kill in between
        for run in runs:
            run.ledger.close()


def _train_alone(shared: SearchRun, candidate: Drawn) -> None:
    folder = shared.folder_of(candidate)
    own = prepared_candidate(shared, candidate)
    spec = _spec(shared, candidate, own)
    try:
        ledger = train(spec, private_directory(folder.path), OsEntropy())
    except (OSError, LedgerError, CheckpointError):
        raise
    except (DivergedError, BudgetError) as error:
        _fail(folder, str(error))
    except Exception as error:  # it repeats, for a shared pass was tried before or nothing is shared
        _raise_if_full(error)
        _fail(folder, f"{_CRASH}{type(error).__name__}: {error}")
    else:
        _finish(shared, candidate, own, spec.model, ledger)


def _finish(shared: SearchRun, candidate: Drawn, own: PreparedRun, model: Any, ledger: Ledger) -> None:
    """Write the weights, charge and draw the score, and end the ledger, in this order."""
    folder, base = shared.folder_of(candidate), own.base
    try:
        write_weights(model, base.tokenizer, folder, base.name, base.revision, own.kept)
        for path in partial_of(folder).rglob("*"):  # some libraries write files that every user may read
            path.chmod(PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE)
        write_json(folder.path / OUTCOME, {"score": _score(shared, folder, model, own), "why": ""})
        ledger.finish()
    except (OSError, LedgerError):
        raise
    except Exception as error:  # a score that was charged is lost with it
        _raise_if_full(error)
        _fail(folder, f"{_CRASH}{type(error).__name__}: {error}")
    finally:
        ledger.close()


def _raise_if_full(error: Exception) -> None:
    """Raise FullDeviceError where it is the GPU that is full: no candidate failed then."""
    if is_out_of_memory(error):
        raise FullDeviceError from None


def _fail(folder: RunFolder, why: str) -> None:
    write_json(folder.path / OUTCOME, {"score": None, "why": why})


def _score(shared: SearchRun, folder: RunFolder, model: Any, own: PreparedRun) -> float | None:
    """The candidate's score; None where it is no number, or was charged before and got lost."""
    if shared.scored is None:
        assert own.public is not None
        loss = mean_loss(model, own.public, own.settings.rows)
        return -loss if math.isfinite(loss) else None
    assert shared.before is not None
    tokens, units = shared.scored
    losses = unit_losses(model, tokens, units, own.settings.rows)
    if not charge_score(folder.path / SCORE_LEDGER, score_header(shared), shared.terms):
        return None
    return noisy_score(losses, shared.before, shared.terms, OsEntropy())


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


def charge_score(path: Path, header: RunHeader, terms: ScoreTerms) -> bool:
    """Charge one score; False if it was charged before, so that a value may have been drawn and got lost."""
    release = terms.release
    assert release is not None
    if path.exists():
        discard_unborn(path)
    if path.exists() and (is_complete(path) or read_ledger(path).releases):
        return False
    planned = Counter([release])
    with Ledger.resume(path, planned) if path.exists() else Ledger.create(path, header, planned) as ledger:
        if ledger.releases:
            return False
        ledger.charge(release)
        ledger.finish()
    return True


def end_ledger(folder: RunFolder) -> None:
    """End the ledger of a candidate that was killed after its outcome was written."""
    if not is_complete(folder.ledger):
        Ledger.resume(folder.ledger, Counter()).finish()
