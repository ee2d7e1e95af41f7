"""Fine-tunes, evaluates and prices cells, and writes their results. The process can be killed at any time.

Several cells of one model share the process, the base and every forward pass, and nothing else.

python -m tasks.experiment.finetune CELL.json ... [--device cuda:0] [--parent MLFLOW_RUN] [--flow-run PREFECT_RUN]
torchrun --nproc-per-node 4 -m tasks.experiment.finetune CELL.json          # one run on four GPUs
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dptune.core.errors import ConfigError, DptuneError, is_out_of_memory
from dptune.core.files import locked, private_directory
from dptune.job.result import RunResult
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.run_folder import RunFolder
from dptune.training.loop import follow
from dptune.training.models.model import check_device
from dptune.training.ranks import LostRankError, Ranks, join_ranks, own_device
from tasks.experiment.cell_training import (
    CellsError,
    _fail,
    _finish,
    _start_cell,
    _train_all,
    _train_alone,
    _TrainingCell,
    divergence_of,
    full_device,
    is_unforeseen,
    keep_divergence,
    log_failure,
)
from tasks.experiment.cells import Cell, is_finished
from tasks.experiment.preparation import prepare, shared_inputs
from tasks.experiment.results import publish
from tasks.experiment.spent_budgets import note_records
from tasks.split_records import records_digest
from tasks.stage import run_command

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
    return RunResult.read(RunFolder(cell.directory).result).to_dict()


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
        raise ConfigError(str(path), f"is not a cell ({error})", fix="let the flow write it") from None


if __name__ == "__main__":
    run_command(main)
