"""Fine-tunes, evaluates and prices cells, and writes their results. The process can be killed at any time.

Several cells of one model share the process, the base and every forward pass, and nothing else.

python -m tasks.experiment.finetune CELL.json ... [--device cuda:0] [--parent MLFLOW_RUN] [--flow-run PREFECT_RUN]
torchrun --nproc-per-node 4 -m tasks.experiment.finetune CELL.json          # one run on four GPUs
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.audit.crafted import CraftedCanaries
from dptune.errors import ConfigError, DivergedError, DptuneError, is_out_of_memory
from dptune.files import locked, private_directory, read_json, write_json
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.run_folder import RunFolder
from dptune.progress import Meter
from dptune.training.checkpoints import restarts
from dptune.training.loop import follow, train
from dptune.training.model import DIVERGED, check_device
from dptune.training.opening import open_run, rehearse_run
from dptune.training.ranks import LostRankError, Ranks, join_ranks, own_device
from dptune.training.rehearsal import first_evaluation
from dptune.training.run import Run, StepReport
from dptune.training.together import train_together
from tasks.drawing import draw_curves
from tasks.experiment.cell_errors import (
    CellsError,
    divergence_of,
    full_device,
    is_unforeseen,
    keep_divergence,
    log_failure,
)
from tasks.experiment.cells import Cell, is_finished
from tasks.experiment.crafted import crafted_canaries, write_crafted
from tasks.experiment.prepare import PreparedCell, SharedInputs, prepare, shared_inputs
from tasks.experiment.quality import MEASURES, first, label_scores, spread, text_scores
from tasks.experiment.results import History, child_run, publish, result_of
from tasks.experiment.spent import note_records, register_cell
from tasks.experiment.weights import adapter_digest, write_adapter, write_policy
from tasks.metrics import measured
from tasks.split_records import records_digest
from tasks.stage import run_command
from tasks.tracking import ChildRun

_log = logging.getLogger(__name__)


def run_cell(
    cell: Cell,
    device: str,
    parent: str | None = None,
    flow_run: str = "none",
    entropy: Entropy | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Run a cell to its end, resuming the run in its folder. Returns the content of result.json.

    The last line of the ledger is written after everything else is safe, so a finished ledger means a
    finished cell. Of several ranks this is number 0, which alone evaluates, reports and writes.
    """
    run_cells([cell], device, parent, flow_run, entropy, ranks)
    return read_json(RunFolder(cell.directory).result)


def run_cells(
    cells: Sequence[Cell],
    device: str,
    parent: str | None = None,
    flow_run: str = "none",
    entropy: Entropy | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    *,
    wait: bool = False,
) -> None:
    """Run cells of one model to their ends in one process; see ``run_cell``. Several ranks take one cell.

    Args:
        wait: whether to wait for another process that works on one of the cells, instead of raising.

    An error of a cell's own ends it, and a cell that diverged is never resumed. What a pass raised ends no cell: each
    goes on alone, once. So does a cell that was alone.

    Raises: for one cell, the error that ended it; for several, CellsError or RuntimeError naming those that failed,
        after all others have ended.
    """
    with ExitStack() as locks:
        # Locks are taken in one order everywhere: otherwise two processes could wait for each other for ever.
        for cell in sorted(cells, key=lambda cell: cell.directory):
            locks.enter_context(locked(RunFolder(private_directory(cell.directory)).lock, wait=wait))
            _remove_torn_checkpoints(cell.directory)
        errors = {cell.directory: error for cell in cells if (error := divergence_of(cell.directory))}
        waiting = [cell for cell in cells if not (is_finished(cell.directory) or cell.directory in errors)]
        if ranks.broadcast(bool(waiting)):
            _agree(cells[0], ranks)
            try:
                found, again = _train_cells(waiting, device, parent, flow_run, entropy or OsEntropy(), ranks)
                for cell in again:
                    _log.warning("cell %s goes on alone, once: its pass failed", cell.label)
                    del found[cell.directory]
                    found |= _train_cells([cell], device, parent, flow_run, entropy or OsEntropy(), ranks)[0]
                errors |= found
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise full_device() from None
        for cell in cells:
            if cell.directory not in errors:
                try:
                    publish(cell.directory, parent)
                    RunFolder(cell.directory).checkpoint.unlink(missing_ok=True)
                except Exception as error:  # the other cells must still be finished
                    errors[cell.directory] = log_failure(cell.label, error)
    if errors:
        raise next(iter(errors.values())) if len(cells) == 1 else _combine_errors(errors)


def _remove_torn_checkpoints(directory: Path) -> None:
    """Remove half-written checkpoints of a killed process. The caller must hold the folder's lock."""
    for torn in directory.glob(f".{RunFolder(directory).checkpoint.name}.*.partial"):
        torn.unlink()


def help_cell(cell: Cell, device: str, ranks: Ranks) -> None:
    """Take part in a cell as another rank, while rank 0 is in ``run_cell``."""
    if ranks.broadcast(None):
        _agree(cell, ranks)
        entropy = OsEntropy()
        follow(prepare(cell, shared_inputs(cell, check_device(device)), entropy).spec, entropy, ranks)


def _agree(cell: Cell, ranks: Ranks) -> None:
    """Check that all ranks run the same cell. It holds the data's digest, which each rank compares with its files."""
    ranks.agree({"cell": cell.model_dump_json()})


def _combine_errors(errors: dict[Path, Exception]) -> Exception:
    message = "; ".join(f"cell {path.name}: {str(error) or type(error).__name__}" for path, error in errors.items())
    hopeless = all(isinstance(error, DptuneError | OSError) for error in errors.values())
    return CellsError(message) if hopeless else RuntimeError(message)


@dataclass
class _TrainingCell:
    """A cell while it trains, and the objects that log its progress.

    Attributes:
        canaries: the auditor's crafted canaries; None without any.
        child: the cell's run in MLflow; None without a parent.
        before: perplexities of the base model; ``sample`` are those on the records of the learning curves.
        started: time at which the cell was started, by the monotonic clock.
        last: the last step that this process made; None before any.
        own: the error of its own that ended it, if one did, and not one of its pass.
    """

    prepared: PreparedCell
    canaries: CraftedCanaries | None
    child: ChildRun | None
    history: History
    meter: Meter
    before: dict[str, float]
    sample: dict[str, float]
    started: float
    last: StepReport | None = None
    own: list[Exception] = field(default_factory=list)

    @property
    def cell(self) -> Cell:
        """The cell that is trained."""
        return self.prepared.cell


def _train_cells(
    cells: Sequence[Cell], device: str, parent: str | None, flow_run: str, entropy: Entropy, ranks: Ranks
) -> tuple[dict[Path, Exception], list[Cell]]:
    """Train the given cells.

    Returns: the errors of cells that failed, by their folders, and those of the cells that their pass ended.
    """
    shared, records = shared_inputs(cells[0], check_device(device)), records_digest()
    errors: dict[Path, Exception] = {}
    perplexity_before: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    training: list[_TrainingCell] = []
    for cell in cells:
        try:
            note_records(cell.directory, records)
            training.append(_start_cell(cell, shared, parent, flow_run, entropy, ranks, perplexity_before))
        except Exception as error:
            errors[cell.directory] = log_failure(cell.label, error)
    try:
        if len(training) == 1:
            ended = _train_alone(training[0], entropy, ranks)
        else:
            ended = _train_all(training, shared, entropy)
    except BaseException:  # the whole process is to end
        for one in training:
            _fail(one)
        raise
    used = device if ranks.world == 1 else f"{ranks.world} ranks, this one on {device}"
    again = [
        one.cell
        for one, end in zip(training, ended, strict=True)
        if isinstance(end, Exception) and is_unforeseen(end) and not one.own and ranks.world == 1
    ]
    for one, end in zip(training, ended, strict=True):
        try:
            with one.meter:
                if isinstance(end, Exception):
                    raise end
                with end as ledger:
                    _finish(one, ledger, records, used, len(cells))
        except Exception as error:
            errors[one.cell.directory] = log_failure(one.cell.label, error)
            keep_divergence(one.cell.directory, error)
            _fail(one)
        except BaseException:
            _fail(one)
            raise
    return errors, again


def _fail(one: _TrainingCell) -> None:
    if one.child:
        one.child.end("FAILED")


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
    canaries = crafted_canaries(cell)
    if canaries:
        units = prepared.spec.units.with_slots(canaries.included)
        prepared = replace(prepared, spec=replace(prepared.spec, units=units, auditor=canaries))
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
    return _TrainingCell(
        prepared=prepared,
        canaries=canaries,
        child=child_run(prepared, parent, flow_run),
        history=History(cell.directory, steps),
        meter=Meter(cell.label, total=steps, unit="releases", keep=True),
        before=before,
        sample=sample,
        started=started,
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
    prepared, directory, contents = one.prepared, one.cell.directory, _contents(ledger)
    register_cell(records, one.cell, contents)  # a run that diverged has paid as well
    if one.last and one.history.points()[-1]["releases"] < one.last.releases:  # the noise used the budget up early
        _add_point(one, one.last)
    after = _evaluate(prepared, final=True)
    check_converged(one.cell.label, after)
    written = text_scores(prepared, directory)
    write_adapter(prepared.spec.model, directory)
    write_policy(prepared, contents, directory)
    write_crafted(one.canaries, directory)
    seconds = time.monotonic() - one.started
    result = result_of(prepared, contents, one.before, after, one.history, seconds, device)
    begun: dict[str, Any] = {**restarts(RunFolder(directory).checkpoint, prepared.spec.mechanism)}
    result = replace(result, together=together, adapter_sha256=adapter_digest(directory), **written, **begun)
    draw_curves([result.to_dict()], directory / "curves.png")
    write_json(RunFolder(directory).result, result.to_dict())
    if one.child:
        one.child.flush()
    ledger.finish()


def check_converged(label: str, figures: Mapping[str, float]) -> None:
    """Check that a run did not diverge: its weights predict nothing, so it must not be reported as finished.

    Figures of held-out private records decide nothing: whether the run ends would tell of them, and no epsilon would
    cover that.

    Raises: DivergedError naming the figure of public records that is not finite.
    """
    public = {metric.name for metric in measured("private", "end")}
    for name, value in figures.items():
        if name in public and not math.isfinite(value):
            raise DivergedError(f"{label}: the run diverged: {name} is {value} at its end. Fix: {DIVERGED}.")


def _contents(ledger: Ledger) -> LedgerContents:
    return LedgerContents(ledger.header, ledger.composition, ledger.releases, ledger.chain, complete=False)


def _observer(one: _TrainingCell) -> Callable[[StepReport], None]:
    """A function that is called after each step: it logs the step, and evaluates at intervals."""
    cell, child, history = one.cell, one.child, one.history
    every, total = cell.training.evaluate_every, one.prepared.spec.plan.steps

    def observe(report: StepReport) -> None:
        one.meter.update(report.releases)
        if one.last is None and not history.points():
            _begin_curves(one)
        one.last = report
        metrics = {**report.public, "noise_multiplier": report.knobs["noise_multiplier"]}
        if cell.telemetry == "research":
            metrics |= report.private
        looks = report.releases % every == 0 or report.releases == total
        if history.add_knobs(report.releases, report.knobs) or looks:
            metrics |= report.knobs
        if looks:
            metrics |= _add_point(one, report)
            write_crafted(one.canaries, cell.directory)
        if child:
            child.log(report.step, metrics)

    return observe


def _begin_curves(one: _TrainingCell) -> None:
    """Add the point before any release."""
    prices = one.prepared.spec.header.price(Counter()).to_dict()
    one.history.add_point({"step": 0, "releases": 0, **one.sample, **prices})
    if one.child:
        one.child.log(0, one.sample)  # without epsilons: of a run that has none, MLflow would show these zeros


def _add_point(one: _TrainingCell, report: StepReport) -> dict[str, float]:
    """Add a point to the learning curves. Returns its figures."""
    prices = one.prepared.spec.header.price(report.composition).to_dict()
    point = _evaluate(one.prepared, final=False) | prices
    one.history.add_point({"step": report.step, "releases": report.releases, **point})
    return point


def _evaluate(prepared: PreparedCell, *, final: bool) -> dict[str, float]:
    """The metrics that telemetry allows: of public records always, of held-out ones only under research telemetry."""
    cell, spec = prepared.cell, prepared.spec
    assert spec.public is not None  # every prepared cell has validation records
    rows, dtype = 2 * spec.plan.physical_batch_size, spec.plan.autocast_dtype
    chosen = spread if final else first
    most = cell.training.final_records if final else cell.training.evaluate_records
    figures = {}
    for metric in measured(cell.telemetry, "end" if final else "points"):
        records = prepared.evaluation if metric.private else spec.public
        figures[metric.name] = MEASURES[metric.measure](spec.model, chosen(records, most), rows, autocast=dtype)
    return figures | (label_scores(prepared, rows) if final else {})


def main(
    cells: Annotated[list[Path], typer.Argument(help="cell.json of each run; several share one base model")],
    device: Annotated[str | None, typer.Option(help="torch device; default cpu, under torchrun the own GPU")] = None,
    parent: Annotated[str | None, typer.Option(help="MLflow run id of the experiment")] = None,
    flow_run: Annotated[str, typer.Option(help="Prefect flow run id")] = "none",
    wait: Annotated[bool, typer.Option(help="wait for another process that works on one of the cells")] = False,
) -> None:
    """Run one cell, or several side by side on one base model."""
    chosen = [_read(cell) for cell in cells]
    try:
        with join_ranks() as ranks:
            if ranks.world > 1 and len(chosen) > 1:
                raise ConfigError("cells", f"{len(chosen)} are too many for several ranks", fix="give one")
            if ranks.rank:
                help_cell(chosen[0], device or own_device(), ranks)
            else:
                run_cells(chosen, device or own_device(), parent, flow_run, ranks=ranks, wait=wait)
    except LostRankError as error:
        sys.exit(f"error: {error}")


def _read(path: Path) -> Cell:
    try:
        return Cell.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"is no cell ({error})", fix="let the flow write it") from None


if __name__ == "__main__":
    run_command(main)
