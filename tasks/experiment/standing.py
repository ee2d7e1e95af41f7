"""Says how far an experiment came, after Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from dptune.privacy.calibration import sampling
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder
from tasks.experiment.cells import Cell, federation, is_finished


def standing(cells: Sequence[Cell]) -> str:
    """Releases so far, and planned releases, of the cells under way; of several cells, also how many are finished.

    Public.
    """
    waiting = [cell for cell in cells if not is_finished(cell.directory)]
    done = total = 0
    for cell in waiting:
        with suppress(LedgerError, OSError):  # not begun, or its first line is torn
            contents = read_ledger(RunFolder(cell.directory).ledger)
            done += contents.releases
            total += steps(cell, contents.header.units)
    where = f"at release {done} of {total}" if total else "before the first release"
    return where if len(cells) == 1 else f"{where}, with {len(cells) - len(waiting)} of {len(cells)} cells finished"


def steps(cell: Cell, units: int) -> int:
    """The number of releases of a whole run on ``units`` units."""
    clients = federation(cell)
    expected = clients.clients_per_round if clients is not None else cell.training.expected_batch_size
    return sampling(units, expected, cell.training.epochs)[1]
