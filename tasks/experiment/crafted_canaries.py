"""The auditor's crafted canaries of a run, in a file: coins and scores outlive the process that tossed them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dptune.audit.crafted_canaries import CraftedCanaries
from dptune.core.errors import DataError
from dptune.core.files import private_directory, read_json, write_json
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import fresh_start
from tasks.experiment.cells import Cell
from tasks.paths import CRAFTED


def crafted_canaries(cell: Cell) -> CraftedCanaries | None:
    """The auditor's crafted canaries, None without any. A resumed run keeps its coins and scores."""
    if cell.crafted == 0:
        return None
    directory = cell.directory
    # Without a ledger the run is new: a file that lies there belongs to a run that was set aside.
    known = read_crafted(directory) if RunFolder(directory).ledger.exists() else None
    one = known or CraftedCanaries.toss(cell.crafted)
    return KeptCanaries(one.included, one.scores, one.moves, run=directory)


@dataclass
class KeptCanaries(CraftedCanaries):
    """Canaries whose coins outlive this process.

    Attributes:
        run: the folder of the run.
    """

    run: Path = field(default=Path(), repr=False)

    def on_open(self, releases: int) -> None:
        """Write the coins of a new run. The caller holds the ledger's lock, so that no other process replaces them.

        Raises: DataError if the run goes on and the file holds other coins, or none.
        """
        kept = read_crafted(self.run) if releases else self
        if kept is None or not np.array_equal(kept.included, self.included):
            problem = "does not hold the coins that this run's releases were made with"
            raise DataError(problem, fix=f"restore it; or {fresh_start(self.run)}", file=crafted_file(self.run))
        if not releases:
            write_crafted(self, self.run)


def write_crafted(canaries: CraftedCanaries | None, directory: Path) -> None:
    """Write ``crafted_file``; nothing for a run without canaries."""
    if canaries is not None:
        private_directory(CRAFTED.parent)
        coins, scores = canaries.included.astype(int).tolist(), canaries.scores.tolist()
        moves = [None if math.isnan(move) else move for move in canaries.moves]
        write_json(crafted_file(directory), {"included": coins, "scores": scores, "moves": moves})


def crafted_file(directory: Path) -> Path:
    """The file of the coins and scores of a cell's crafted canaries. It lies with the other secrets, in no cache."""
    return CRAFTED / f"{directory.name}.json"


def read_crafted(directory: Path) -> CraftedCanaries | None:
    """Read ``crafted_file``; None if there is none."""
    file = crafted_file(directory)
    if not file.exists():
        return None
    stored = read_json(file)
    moves = [math.nan if move is None else move for move in stored["moves"]]
    return CraftedCanaries(np.array(stored["included"], dtype=bool), np.array(stored["scores"]), moves)
