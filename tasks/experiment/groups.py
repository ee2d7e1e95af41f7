"""Which cells share a process: those that stand on one model and one schedule, a few at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.experiment.cells import Cell, federation, is_finished, of_a_pass


@dataclass(frozen=True)
class CellGroup:
    """Cells that one process trains, each to its own end."""

    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """A cell's own, or the first one's and how many more there are."""
        more = f" and {len(self.cells) - 1} more" if len(self.cells) > 1 else ""
        return self.cells[0].label + more

    @property
    def key(self) -> str:
        """Where the flow keeps what became of them: in a folder of theirs, which takes it along when set aside."""
        first, *others = (cell.directory.name for cell in self.cells)
        digest = f"-{hashlib.sha256(' '.join(others).encode()).hexdigest()[:8]}" if others else ""
        return f"{first}/prefect_result{digest}"

    @property
    def unfinished(self) -> list[Cell]:
        """Those whose folder holds no whole run."""
        return [cell for cell in self.cells if not is_finished(cell.directory)]


def grouped(cells: Sequence[Cell], most: int, places: int | None = None) -> list[CellGroup]:
    """Cells in groups of at most ``most``, and of fewer where that fills more of the ``places`` that there are.

    A cell that is finished, or that trains locally, is alone.
    """
    alone = [cell for cell in cells if most == 1 or is_finished(cell.directory) or federation(cell)]
    shared: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell not in alone:
            shared.setdefault(_inputs(cell), []).append(cell)
    groups = [CellGroup((cell,)) for cell in alone]
    for together in shared.values():
        size = min(most, math.ceil(len(together) / (places or 1)))
        count = math.ceil(len(together) / size)
        groups += [CellGroup(tuple(together[start::count])) for start in range(count)]
    return groups


def _inputs(cell: Cell) -> str:
    inputs = {name: digest for name, digest in cell.inputs.items() if name not in ("plugins", "policy")}
    return json.dumps([cell.model_name, cell.unit, of_a_pass(cell), inputs], sort_keys=True)
