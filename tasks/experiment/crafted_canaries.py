"""The auditor's crafted canaries of a cell: their file lies with the other secrets, outside the cell's folder."""

from __future__ import annotations

from pathlib import Path

from dptune.job.audit_canaries import KeptCanaries
from dptune.privacy.run_folder import RunFolder
from tasks.experiment.cells import Cell
from tasks.paths import CRAFTED


def crafted_canaries(cell: Cell) -> KeptCanaries | None:
    """The auditor's crafted canaries, None without any. A resumed run keeps its coins and scores."""
    if cell.crafted == 0:
        return None
    directory = cell.directory
    # Without a ledger the run is new: a file that lies there belongs to a run that was set aside.
    known = read_crafted(directory) if RunFolder(directory).ledger.exists() else None
    return known or KeptCanaries.new(cell.crafted, directory, crafted_file(directory))


def crafted_file(directory: Path) -> Path:
    """The file of the coins and scores of a cell's crafted canaries. It lies with the other secrets, in no cache."""
    return CRAFTED / f"{directory.name}.json"


def read_crafted(directory: Path) -> KeptCanaries | None:
    """Read ``crafted_file``; None if there is none."""
    file = crafted_file(directory)
    return KeptCanaries.read(directory, file) if file.exists() else None
