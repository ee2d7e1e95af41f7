"""A tuning run: trains a prepared run and delivers its adapter with its proof; a second call resumes it."""

from __future__ import annotations

import json
import logging
import math
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import forget_times, locked, private_directory, replacing_folder, write_json
from dptune.core.files import sha256 as sha256_of
from dptune.core.progress import Meter
from dptune.job.audit_canaries import KeptCanaries, canaries_of
from dptune.job.delivery.adapter_loading import with_trained
from dptune.job.delivery.deliverable import deliver, write_card, write_weights
from dptune.job.delivery.settings_rows import public_settings
from dptune.job.delivery.verification import CARD, check_deliverable
from dptune.job.delivery.weights import partial_of
from dptune.job.path_checks import check_folder
from dptune.job.preparation import PreparedRun
from dptune.job.result import HELD_OUT, PUBLIC, SIDES, Figures, RunResult, charged, check_converged
from dptune.job.settings import FREE, as_written_now
from dptune.mechanisms.planning import as_charged, planned
from dptune.mechanisms.versions import VERSIONS, check_versions
from dptune.privacy.accountants import Epsilons
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Booked
from dptune.privacy.ledger_file import (
    LedgerContents,
    LedgerError,
    first_header,
    first_release,
    is_complete,
    read_ledger,
)
from dptune.privacy.run_folder import RunFolder, fresh_start, said_within
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.booking import booked
from dptune.privacy.spent_budgets.register import Register, said
from dptune.training.checkpoints import restarts
from dptune.training.evaluation import Measurement, measure_model, perplexity, score_classifier
from dptune.training.gradients.gradient_check import first_evaluation
from dptune.training.loop import train
from dptune.training.losses import is_classifier
from dptune.training.run import StepReport
from dptune.training.run_start import rehearse_run
from dptune.training.spec import RunSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """A finished run.

    Attributes:
        model: the PEFT model with the tuned adapter, or the model whose own weights trained; in evaluation mode.
        ledger: content of the ledger file: all that was charged.
        perplexity: perplexities before and after, by the records they were measured on (``HELD_OUT``, ``PUBLIC``);
            empty for a classifier. Those of held-out private records are private: no epsilon covers them.
        scores: scores of a classifier before and after, by those records and by their names in
            ``training.evaluation.Scores``; empty for other models. Private likewise.
        certificate: what the guarantee of a search is computed from; None for a single run.
        restarts: how often correlated noise began anew, because the process before had ended; 0 for a search.
        folder: the run's folder; ``save`` copies ``folder / "adapter"``.
    """

    model: Any = field(repr=False)
    ledger: LedgerContents
    perplexity: Mapping[str, tuple[float, float]]
    folder: Path
    scores: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    certificate: SearchCertificate | None = field(default=None, repr=False)
    restarts: int = 0

    @property
    def epsilons(self) -> Epsilons:
        """Published, noise only and certified, computed from the ledger; of a search, from its certificate.

        Of a search the published one is infinite, for the mechanisms' papers count no search.
        """
        return prices_of(self.ledger, self.certificate)

    def save(self, folder: str | Path) -> Path:
        """Copy trained weights, tokenizer, ledger and card to a new folder, for the code on the card and ``verify``.

        The folder is there whole or not at all.

        Raises: DptuneError if the folder exists and holds something.
        """
        target = Path(folder)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise DptuneError(f"{target}: holds something already. Fix: give a new folder.")
        with replacing_folder(target) as made:
            copytree(RunFolder(self.folder).adapter, made, dirs_exist_ok=True)
        return target


def prices_of(contents: LedgerContents, certificate: SearchCertificate | None) -> Epsilons:
    """The epsilons of a run, or of the search that the run won."""
    if certificate is None:
        return contents.epsilons
    return Epsilons(math.inf, certificate.epsilon_by(certificate.bound), certificate.certified, certificate.all_leaks)


def run(
    prepared: PreparedRun,
    out: Path,
    register: Register,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_start: Callable[[], None] = lambda: None,
) -> Tuned:
    """Train, or resume the run in ``out``; a finished run is only loaded.

    Args:
        register: the run counts there from the first line of its ledger on.
        on_step: called after each step; under private telemetry it must not publish ``report.private``.
        on_start: called after all checks have passed, before any work.

    Raises: all errors of ``tune``; ConfigError if ``out`` was started with other settings or records.
    """
    with working_in(out):
        return run_here(prepared, out, register, on_step, on_start)


@contextmanager
def working_in(out: Path) -> Iterator[None]:
    """Context in which no other process works in the folder of a run.

    Raises: DptuneError if one does; ConfigError as ``check_folder``.
    """
    check_folder(out)
    with locked(private_directory(out) / RunFolder(out).lock.name):
        check_folder(out)  # again: a search may have begun in between
        yield


def run_here(
    prepared: PreparedRun,
    out: Path,
    register: Register,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_start: Callable[[], None] = lambda: None,
) -> Tuned:
    """The same within ``working_in``, for a caller that does more in the folder than this."""
    folder, records = RunFolder(out), prepared.fingerprint
    header = replace(prepared.header, run_id=check_same(prepared, folder))
    begun, canaries = first_header(folder.ledger), None
    if (planted := prepared.settings.audit_canaries) and not is_complete(folder.ledger):
        canaries = canaries_of(folder.path, folder.canaries, planted, begun.coins if begun else None)
        header = replace(header, **canaries.in_header)
    # As the run was begun, by an earlier version maybe.
    mechanism = as_charged(prepared.mechanism.mechanism, first_release(folder.ledger))
    releases = planned(mechanism, prepared.schedule.priced)
    add = partial(register.add_run, records, header, releases, folder=out.resolve().name)
    booking = partial(booked, folder, records, register.path, add)
    if begun:  # it counts already, unless the register was cut since, or is another one
        with booking():
            pass
    if folder.adapter.exists() and not is_complete(folder.ledger):  # trained again, it would release once more
        problem = f"{folder.ledger}: is not the whole ledger of the run that delivered {folder.adapter}"
        raise LedgerError(f"{problem}. Fix: restore it; that folder holds a copy.")
    on_start()
    model = None if is_complete(folder.ledger) else _train(prepared, header, folder, on_step, booking, canaries)
    if partial_of(folder).exists() and folder.result.exists():
        deliver(folder, RunResult.read(folder.result))
    folder.checkpoint.unlink(missing_ok=True)
    contents = check_deliverable(folder.adapter)
    if f"- {HELD_OUT}: " in (card := folder.adapter / CARD).read_text(encoding="utf-8"):  # of an earlier version
        write_card(folder.adapter, RunResult.read(folder.result))
        forget_times(folder.adapter)
        _log.warning("%s showed figures of held-out private records; it was written again without them", card)
    if model is None:
        model = with_trained(prepared.base.load(), folder.adapter)
    return tuned_of(model.eval(), contents, out)


def tuned_of(model: Any, contents: LedgerContents, out: Path, certificate: SearchCertificate | None = None) -> Tuned:
    """The outcome of a finished run or search, with the figures in its result."""
    result = RunResult.read(RunFolder(out).result)
    figures, classifies = result.by_records(), result.task == "classify"
    return Tuned(
        model,
        contents,
        {} if classifies else {records: own["perplexity"] for records, own in figures.items()},
        out,
        figures if classifies else {},
        certificate,
        (result.restarts or 0) if certificate is None else 0,
    )


def paid_before(register: Register, prepared: PreparedRun, *own: Path) -> list[str]:
    """Warnings if something was published from these records before, by other runs than those in the folders."""
    mine = [RunFolder(folder) for folder in own]
    ids = [str(folder.settings.get("run_id", "")) for folder in mine if not folder.lost_its_ledger]
    earlier = register.earlier(prepared.fingerprint, besides=ids)
    here = [f"these records paid before ({said(earlier)}); what this costs adds to that"] if earlier else []
    return here + register.elsewhere(prepared.fingerprint)


def spec_of(prepared: PreparedRun, weights: Any, header: RunHeader) -> RunSpec:
    """The specification of a run, with new adapters on these weights. Raises: ConfigError as ``Base.start``."""
    one, mechanism = prepared, prepared.mechanism.mechanism
    model = one.base.start(one.settings.seed, weights)
    return RunSpec(model, one.tokens, one.units, mechanism, one.plan, header, public=one.public)


def _train(
    prepared: PreparedRun,
    header: RunHeader,
    folder: RunFolder,
    on_step: Callable[[StepReport], None],
    booking: Booked,
    canaries: KeptCanaries | None,
) -> Any:
    """Train the run to its end, and return its model. Weights and result are on disk before the ledger's last line."""
    base = prepared.base
    spec = replace(spec_of(prepared, base.load(), header), booked=booking)
    if canaries:
        spec = canaries.planted_in(spec)
    named = base.named  # of the weights that were loaded, not of what lies there when the run has ended
    model = spec.model
    rehearse_run(spec)  # before the records are read by it, for its errors say what is wrong with the model
    with first_evaluation(model):
        before = figures_of(prepared, model)
    done = read_ledger(folder.ledger).releases if folder.checkpoint.exists() and folder.has_begun else 0
    with Meter("tuning", total=spec.plan.steps, done=done, unit="releases", keep=True) as meter:

        def observe(report: StepReport) -> None:
            meter.update(report.releases)
            on_step(report)

        with train(spec, folder.path, OsEntropy(), observe) as ledger:
            after = figures_of(prepared, model)
            check_converged(after)
            write_weights(model, base.tokenizer, folder, named, prepared.kept)
            result = result_of(prepared, before, after, ledger.contents)
            replace(result, restarts=restarts(folder.checkpoint, spec.mechanism)).write(folder.result)
            ledger.finish(sha256_of(folder.canaries) if canaries else "")
    return model


def figures_of(prepared: PreparedRun, model: Any) -> Figures:
    """Perplexities, or a classifier's scores, of held-out and of public records, as ``measure_model`` allows them."""
    classifies = is_classifier(model)
    wanted = {
        SIDES[records] if classifies else f"{SIDES[records]}_perplexity": Measurement(
            score_classifier if classifies else perplexity, tokens, private=records == HELD_OUT
        )
        for records, tokens in ((HELD_OUT, prepared.evaluation), (PUBLIC, prepared.public))
    }
    plan, telemetry = prepared.plan, prepared.settings.telemetry
    return measure_model(model, wanted, plan.physical_batch_size, telemetry=telemetry, autocast=plan.autocast_dtype)


def result_of(
    prepared: PreparedRun,
    before: Figures,
    after: Figures,
    contents: LedgerContents,
    certificate: SearchCertificate | None = None,
) -> RunResult:
    """The result of a run, or of a search's winner with the search's certificate."""
    classifies = prepared.settings.task == "classify"
    return RunResult(
        before=before,
        after=after,
        task=prepared.settings.task,
        **charged(contents, prepared.mechanism.mechanism, prepared.plan, prices_of(contents, certificate)),
        base=prepared.base.name,
        revision=prepared.base.revision,
        loaded_by=prepared.base.loaded_by,
        settings=public_settings(prepared),
        labels=list(prepared.settings.labels or ()),
        template=prepared.template if classifies else None,
        words=dict(prepared.base.words),
    )


def _differences(name: str, then: Any, now: Any) -> list[str]:
    """What changed of one setting, in words; of a mapping, what changed of each of its keys."""
    if name in ("model", "records", "keys"):
        return [name]
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        return [part for key in keys for part in _differences(f"{name}.{key}", then.get(key), now.get(key))]
    before, after = ("not given" if value is None else value for value in (then, now))
    return [f"{name}: {before} then, {after} now"]


def check_same(prepared: PreparedRun, folder: RunFolder) -> str:
    """Write the settings of a new run to its folder; of a resumed run, check that settings and records are the same.

    The digest of the records is keyed by a salt in the same file, which only its owner can read.

    Returns: the id of the run, which other settings or records change, as long as nothing was charged. A run whose
        ledger was removed is another one, so that a register counts both.

    Raises: ConfigError naming what changed, of settings, records or the versions of parts.
    """
    known = folder.settings
    salt = known.get("salt") or secrets.token_hex(16)
    asked = {
        "model": prepared.base.identity,
        "records": prepared.digest(salt),
        "keys": prepared.digest_of_keys(salt),
        "unit": prepared.units.kind,
        **asdict(prepared.settings),
        **{name: value for name, value in asdict(prepared.schedule).items() if name != "reasons"},
        "salt": salt,
    }
    if checkpoint := prepared.base.checkpoint:
        asked["dtype"] = checkpoint.dtype  # by default it follows the device, and a resumed run may have another
    for name in FREE:
        del asked[name]
    written = json.loads(json.dumps(asked))
    # Earlier versions wrote no digest of the keys. Such a run goes on, and from then on it has one.
    then = {"keys": written["keys"], **as_written_now(known)} if known else {}
    changed = [name for name in written if written[name] != then.get(name)]
    begun, versions = first_header(folder.ledger), prepared.versions
    if begun and not known and not is_complete(folder.ledger):  # nothing else keeps settings and versions
        problem = f"{folder.cell} is missing, which says by what settings, records and version of dptune the run began"
        raise ConfigError("out", problem, fix=f"restore it, give another folder, or {fresh_start(folder.path)}")
    if not known or begun is None:
        drawn = uuid.uuid4().hex if changed or folder.lost_its_ledger else known["run_id"]
        run_id = begun.run_id if begun else drawn
        write_json(folder.cell, written | {"run_id": run_id, "kind": "run", VERSIONS: versions})
        return run_id
    if changed:
        told = [part for name in changed for part in _differences(name, then.get(name), written[name])]
        problem = f"{folder.path} was started with other settings ({'; '.join(told)})"
        afresh = f"{fresh_start(folder.path)}{said_within(folder.path)}"
        raise ConfigError("out", problem, fix=f"restore them, give another folder, or {afresh}")
    check_versions(known, versions, folder.path, ended=is_complete(folder.ledger))
    if "keys" not in known:
        write_json(folder.cell, {**known, "keys": written["keys"]})
    # Of an earlier version it follows from the secret salt, and does not show it. Of others it is the ledger's own,
    # which may have been lost for a while.
    return begun.run_id if "run_id" in known else sha256(salt.encode()).hexdigest()[:32]
