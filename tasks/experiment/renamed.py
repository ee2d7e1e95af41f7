"""Renamed runs: runs of a cell's own settings, data and model that lie under another name, made by other versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path

from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder
from tasks.experiment.cells import Cell, is_finished
from tasks.experiment.versions import changes
from tasks.paths import RUNS


@dataclass(frozen=True)
class RenamedRun:
    """A run that has released something, and does not count as the cell's any more.

    Attributes:
        label: the cell's.
        folder: where the run lies; it stays there, with its ledger and its adapter.
        state: "finished", or how far it came.
        change: why it has another name.
    """

    label: str
    folder: Path
    state: str
    change: str

    def __str__(self) -> str:
        """One sentence without its full stop, for logs."""
        return (
            f"{self.label}: {self.folder} ({self.state}) has its settings, data and model, but is not taken for it "
            f"({self.change}); the cell trains, and spends, again"
        )


def renamed_runs(cells: Iterable[Cell]) -> list[RenamedRun]:
    """For each cell without a run of its own: the runs that have its settings, data and model under another name.

    A folder that was named by a digest of the code is one of them, because nothing says whether that code gave the same
    numbers as this one.
    """
    return [run for cell in cells if not RunFolder(cell.directory).has_begun for run in _renamed(cell)]


def _renamed(cell: Cell) -> Iterator[RenamedRun]:
    for file in sorted(RUNS.glob(f"{escape(cell.label)}-????????/cell.json")):
        folder = file.parent
        if folder == cell.directory or not RunFolder(folder).has_begun:
            continue
        try:
            other = Cell.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # of a version of dptune with other settings: nothing to compare
        if other.settings == cell.settings and (change := changes(other.versions, cell.versions)):
            yield RenamedRun(cell.label, folder, _state(folder), change)


def _state(folder: Path) -> str:
    if is_finished(folder):
        return "finished"
    try:
        return f"stopped at release {read_ledger(RunFolder(folder).ledger).releases}"
    except (LedgerError, OSError):
        return "its ledger cannot be read"
