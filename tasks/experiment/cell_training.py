"""Training of one cell: its start, its learning curves, and the results that it writes at its end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dptune.core.errors import DivergedError, DptuneError, FullDeviceError, is_of_device, is_out_of_memory
from dptune.core.files import put_folder, read_json, sha256, write_json
from dptune.core.progress import Meter
from dptune.job.audit_canaries import KeptCanaries
from dptune.job.delivery.weights import adapter_digest, written_adapter
from dptune.job.result import check_converged
from dptune.mechanisms.agents.rl import LearnedControl
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.run_folder import RunFolder
from dptune.training.checkpoints import restarts
from dptune.training.data import Tokens
from dptune.training.evaluation import (
    LossGroups,
    Measure,
    Measurement,
    measure_model,
    perplexity_in_groups,
    score_classifier,
)
from dptune.training.gradients.gradient_check import first_evaluation
from dptune.training.gradients.shared_pass import train_together
from dptune.training.loop import train
from dptune.training.losses import is_classifier
from dptune.training.ranks import Ranks
from dptune.training.run import Run, StepReport
from dptune.training.run_start import open_run, rehearse_run
from tasks.charts.curves import draw_curves
from tasks.experiment.cells import Cell
from tasks.experiment.energy import EnergyMeter
from tasks.experiment.preparation import PreparedCell, SharedInputs, prepare
from tasks.experiment.quality import MEASURES, check_prompts, first, spread, text_scores
from tasks.experiment.results import History, child_run, result_of
from tasks.experiment.spent_budgets import register_cell
from tasks.metrics import JOULES, SECONDS, measured
from tasks.mlflow.cell_run import CellRun
from tasks.mlflow.tracking import timed


@dataclass
class _TrainingCell:
    """A cell while it trains, and the objects that log its progress.

    Attributes:
        canaries: the auditor's crafted canaries; None without any.
        child: the cell's run in MLflow; None without a parent.
        before: perplexities of the base model; ``sample`` are those on the records of the learning curves.
        started: time at which the cell was started, by the monotonic clock.
        energy: what the machine uses since then.
        earlier: the last point of the learning curve that an earlier process of this run left.
        last: the last step that this process made; None before any.
        own: the error of its own that ended it, if one did, and not one of its pass.
    """

    prepared: PreparedCell
    canaries: KeptCanaries | None
    child: CellRun | None
    history: History
    meter: Meter
    before: dict[str, float]
    sample: dict[str, float]
    started: float
    energy: EnergyMeter
    earlier: dict[str, float]
    last: StepReport | None = None
    own: list[Exception] = field(default_factory=list)

    @property
    def cell(self) -> Cell:
        """The cell that is trained."""
        return self.prepared.cell


def _fail(one: _TrainingCell) -> None:
    if one.child:
        one.child.end("FAILED")


def crafted_canaries(cell: Cell) -> KeptCanaries | None:
    """The auditor's crafted canaries, None without any. A resumed run keeps its coins and scores."""
    if cell.crafted == 0:
        return None
    folder = RunFolder(cell.directory)
    # Without a ledger the run is new: a file that lies there belongs to a run that was set aside.
    has_own = folder.ledger.exists() and folder.crafted.exists()
    known = KeptCanaries.read(folder.path, folder.crafted) if has_own else None
    return known or KeptCanaries.new(cell.crafted, folder.path, folder.crafted)


def _start_cell(
    cell: Cell,
    shared: SharedInputs,
    parent: str | None,
    flow_run: str,
    entropy: Entropy,
    ranks: Ranks,
    perplexity_before: dict[str, tuple[dict[str, float], dict[str, float]]],
) -> _TrainingCell:
    """Prepare a cell, and start its logs.

    Args:
        perplexity_before: the base model's perplexities by telemetry, in the end and on a sample. Filled here once for
            all cells, because fresh adapters do not change them.
    """
    started = time.monotonic()
    prepared = prepare(cell, shared, entropy)
    ranks.check(prepared.spec.mechanism)
    check_prompts(prepared)
    canaries = crafted_canaries(cell)
    if canaries:
        prepared = replace(prepared, spec=canaries.planted_in(prepared.spec))
    own: list[Exception] = []

    def note(error: Exception) -> None:
        own.append(error)
        keep_divergence(cell.directory, error)

    prepared = replace(prepared, spec=replace(prepared.spec, on_failure=note))
    steps = prepared.spec.plan.steps
    if cell.telemetry not in perplexity_before:
        rehearse_run(prepared.spec)  # before records are read by the model, for its errors say what is wrong with it
        with first_evaluation(prepared.spec.model):
            perplexity_before[cell.telemetry] = (_evaluate(prepared, final=True), _evaluate(prepared, final=False))
    before, sample = perplexity_before[cell.telemetry]
    history = History(cell.directory, steps)
    return _TrainingCell(
        prepared=prepared,
        canaries=canaries,
        child=child_run(prepared, parent, flow_run),
        history=history,
        meter=Meter(cell.label, total=steps, unit="releases", keep=True),
        before=before,
        sample=sample,
        started=started,
        energy=EnergyMeter(str(next(prepared.spec.model.parameters()).device)),
        earlier=next(reversed(history.points()), {}),
        own=own,
    )


def _train_alone(one: _TrainingCell, entropy: Entropy, ranks: Ranks) -> list[Ledger | Exception]:
    try:
        return [train(one.prepared.spec, one.cell.directory, entropy, _observer(one), ranks)]
    except Exception as error:
        return [error]


def _train_all(training: Sequence[_TrainingCell], shared: SharedInputs, entropy: Entropy) -> list[Ledger | Exception]:
    """Train cells side by side. Returns for each its open ledger, or the error that ended it."""
    opened: list[Run | Exception] = []
    for one in training:
        try:
            opened.append(open_run(one.prepared.spec, one.cell.directory, entropy, _observer(one)))
        except Exception as error:
            opened.append(error)
    runs = [run for run in opened if isinstance(run, Run)]
    try:
        errors = iter(train_together(shared.model, runs) if runs else [])
    except (DptuneError, OSError):
        raise
    except Exception as error:  # of the pass as a whole
        errors = iter([error] * len(runs))
    return [(next(errors) or run.ledger) if isinstance(run, Run) else run for run in opened]


def _finish(one: _TrainingCell, ledger: Ledger, records: str, device: str, together: int) -> None:
    """Write all results of a cell, before them its entry under ``records`` in the register, and the ledger's last line
    after everything else."""
    prepared, directory, contents = one.prepared, one.cell.directory, ledger.contents
    register_cell(records, one.cell, contents)  # a run that diverged has paid as well
    if one.last and one.history.points()[-1]["releases"] < one.last.releases:  # the noise used the budget up early
        _add_point(one, one.last)
    groups: dict[str, LossGroups] = {}
    after = _evaluate(prepared, final=True, groups=groups)
    check_converged(after, one.cell.label)
    written = text_scores(prepared, directory)
    write_adapter(prepared.spec.model, directory)
    write_policy(prepared, contents, directory)
    seconds = time.monotonic() - one.started
    result = result_of(prepared, contents, one.before, after, one.history, seconds, device)
    begun = restarts(RunFolder(directory).checkpoint, prepared.spec.mechanism)
    result = replace(result, together=together, adapter_sha256=adapter_digest(directory), restarts=begun, **written)
    result = replace(result, loss_groups=groups)
    draw_curves([result.to_dict()], directory / "curves.png")
    result.write(RunFolder(directory).result)
    if one.child:
        one.child.flush()
    ledger.finish(sha256(one.canaries.file) if one.canaries else "")


def _observer(one: _TrainingCell) -> Callable[[StepReport], None]:
    """A function that is called after each step: it logs the step, and evaluates at intervals."""
    cell, child, history = one.cell, one.child, one.history
    every, total = cell.training.evaluate_every, one.prepared.spec.plan.steps

    def observe(report: StepReport) -> None:
        one.meter.update(report.releases)
        if one.last is None and not history.points():
            _begin_curves(one)
        one.last = report
        metrics, knobs = dict(report.public), {"noise_multiplier": report.knobs["noise_multiplier"]}
        if cell.telemetry == "research":
            metrics |= report.private
        looks = report.releases % every == 0 or report.releases == total
        if history.add_knobs(report.releases, report.knobs) or looks:
            knobs = report.knobs
        if looks:
            metrics |= _add_point(one, report)
        if child:
            child.log(report.step, metrics, knobs)

    return observe


def _begin_curves(one: _TrainingCell) -> None:
    """Add the point before any release."""
    prices = one.prepared.spec.header.price(Counter()).to_dict()
    one.history.add_point({"step": 0, "releases": 0, **one.sample, **prices, **_used(one)})
    if one.child:
        one.child.log(0, one.sample)  # without epsilons: of a run that has none, MLflow would show these zeros


def _add_point(one: _TrainingCell, report: StepReport) -> dict[str, float]:
    """Add a point to the learning curves. Returns its figures."""
    prices = one.prepared.spec.header.price(report.composition).to_dict()
    point = _evaluate(one.prepared, final=False) | prices
    one.history.add_point({"step": report.step, "releases": report.releases, **point, **_used(one)})
    return point


def _used(one: _TrainingCell) -> dict[str, float]:
    """Seconds, and joules where the machine says them, since the cell's start; nothing where no times are published."""
    if not timed(one.cell.telemetry):
        return {}
    told, joules = {SECONDS.name: time.monotonic() - one.started}, one.energy.joules()
    told |= {} if joules is None else {JOULES.name: joules}
    return {name: round(value + one.earlier.get(name, 0.0), 2) for name, value in told.items()}


def _evaluate(prepared: PreparedCell, *, final: bool, groups: dict[str, LossGroups] | None = None) -> dict[str, float]:
    """The metrics that telemetry allows: of public records always, of held-out ones only under research telemetry.

    Args:
        groups: filled with ``perplexity_in_groups`` of each perplexity, by its name; None: not kept.
    """
    cell, spec = prepared.cell, prepared.spec
    assert spec.public is not None  # every prepared cell has validation records
    chosen = spread if final else first
    most = cell.training.final_records if final else cell.training.evaluate_records
    wanted: dict[str, Measurement] = {}
    for metric in measured(cell.telemetry, "end" if final else "points"):
        records = chosen(prepared.evaluation if metric.private else spec.public, most)
        measure: Measure = MEASURES[metric.measure]
        if groups is not None and metric.measure == "perplexity":
            measure = partial(_keeping_groups, groups, metric.name)
        wanted[metric.name] = Measurement(measure, records, metric.private)
    if final and is_classifier(spec.model):
        wanted["eval"] = Measurement(score_classifier, prepared.evaluation, private=True)
    rows, dtype = 2 * spec.plan.physical_batch_size, spec.plan.autocast_dtype
    figures = measure_model(spec.model, wanted, rows, telemetry=cell.telemetry, autocast=dtype)
    figures.pop("eval_loss", None)  # perplexity here is exp of it
    return figures


def _keeping_groups(
    groups: dict[str, LossGroups], name: str, model: Any, tokens: Tokens, rows: int, *, autocast: Any = None
) -> float:
    """The perplexity; its groups are kept under a metric's name, if there are enough records for them."""
    found, own = perplexity_in_groups(model, tokens, rows, autocast=autocast)
    groups |= {name: own} if own else {}
    return found


def write_adapter(model: Any, directory: Path) -> None:
    """Write a run's adapter, whole or not at all."""
    folder = RunFolder(directory)
    with written_adapter(model, folder) as partial:
        put_folder(partial, folder.adapter)


def write_policy(prepared: PreparedCell, contents: LedgerContents, directory: Path) -> None:
    """Write a learned hyper-policy, which another run can start from (``init_from``)."""
    controller = prepared.spec.mechanism.controller
    if isinstance(controller, LearnedControl):
        header = contents.header
        policy = controller.saved_policy(
            prepared.cell.label, header.run_id, header.unit, contents.composition, contents.epsilons.leaks
        )
        if policy is not None:
            policy.write(RunFolder(directory).controller)


# Errors that end a cell.


_log = logging.getLogger(__name__)


class CellsError(DptuneError):
    """Cells that failed for reasons that trying again cannot mend."""


def log_failure(label: str, error: Exception) -> Exception:
    """Return ``error``, after logging the traceback of an unexpected one, which would otherwise be lost."""
    if is_out_of_memory(error):
        return full_device()
    if not isinstance(error, DptuneError | OSError):
        _log.error("cell %s failed", label, exc_info=error)
    return error


def full_device() -> FullDeviceError:
    """Not tried again by itself, for each try pays for a step that it does not make."""
    lower = "lower experiment.cells_per_device, experiment.cells_together or training.physical_batch_size"
    return FullDeviceError(f"{lower}, and run again: cells go on")


def is_unforeseen(error: Exception) -> bool:
    """Whether an error names no fault of settings or disk, and is not the device's, which would fail again."""
    return not (isinstance(error, DptuneError | OSError) or is_of_device(error))


def keep_divergence(directory: Path, error: Exception) -> None:
    """Keep the error of a cell that diverged in its folder: resumed, it might end well by other noise."""
    if isinstance(error, DivergedError):
        write_json(RunFolder(directory).failure, {"why": str(error)})


def divergence_of(directory: Path) -> Exception | None:
    """The error of a cell that diverged, in this process or an earlier one."""
    file = RunFolder(directory).failure
    return DivergedError(read_json(file)["why"]) if file.exists() else None
