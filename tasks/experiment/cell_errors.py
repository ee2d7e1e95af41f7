"""What ended a cell: an error of its own, its pass, or the machine; and what becomes of the cell then."""

from __future__ import annotations

import logging
from pathlib import Path

from dptune.core.errors import DivergedError, DptuneError, FullDeviceError, is_of_device, is_out_of_memory
from dptune.core.files import read_json, write_json
from dptune.privacy.run_folder import RunFolder

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
