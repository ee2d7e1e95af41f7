"""Groups cells that can share a process: those with one base model and one schedule, a few at a time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.experiment.cells import Cell, federation, is_finished, of_a_pass


@dataclass(frozen=True)
class CellGroup:
    """Cells that one process trains side by side."""

    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """The first cell's label, and the number of further cells, if any."""
        more = f" and {len(self.cells) - 1} more" if len(self.cells) > 1 else ""
        return self.cells[0].label + more

    @property
    def key(self) -> str:
        """Path of the flow's cached result. It lies in a cell's folder, so a run that is set aside takes it along."""
        first, *others = (cell.directory.name for cell in self.cells)
        digest = f"-{hashlib.sha256(' '.join(others).encode()).hexdigest()[:8]}" if others else ""
        return f"{first}/prefect_result{digest}"

    @property
    def unfinished_cells(self) -> list[Cell]:
        """The cells whose folder holds no finished run."""
        return [cell for cell in self.cells if not is_finished(cell.directory)]


def group_cells(cells: Sequence[Cell], most: int, places: int | None = None) -> list[CellGroup]:
    """Group cells, at most ``most`` each; groups are smaller if that keeps more of the ``places`` busy.

    A cell that is finished, that trains clients locally, or that learns labels has a group of its own.
    """
    alone = [
        cell for cell in cells if most == 1 or is_finished(cell.directory) or federation(cell) or cell.task.classifies
    ]
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
