"""The list of the cells that the last experiment ran, which says by digests what became of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from dptune.core.errors import DataError
from dptune.core.files import read_json, sha256, write_json
from dptune.job.result import RunResult
from dptune.privacy.calibration import sampling
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder
from tasks.experiment.cells import Cell, federation, is_finished, of_a_pass, read_cell
from tasks.identity import changes
from tasks.paths import RUNS

Result = dict[str, Any]
#: The mechanism that is plain DP-SGD: one fixed radius, Gaussian noise.
PLAIN = "static"
_AGAIN = "run the experiment stage again"


def write_list(experiment: Path, name: str, directories: Sequence[Path]) -> None:
    """Write an experiment file: the cells' folder names, and a digest of each result, so that DVC sees a new one."""
    results = {path.name: RunFolder(path).result for path in directories}
    digests = {cell: sha256(file) for cell, file in results.items() if file.exists()}
    write_json(experiment, {"name": name, "cells": list(results), "results": digests})


def read_results(experiment: Path, runs: Path) -> list[Result]:
    """The results of the cells that an experiment file lists.

    Raises: DataError if the file or a cell's result is missing, or lacks a field of ``RunResult``.
    """
    results = []
    for name in listed_cells(experiment):
        path = RunFolder(runs / name).result
        try:
            results.append(RunResult.read(path).to_dict() | _settings_of(RunFolder(runs / name).cell))
        except (OSError, ValueError):
            raise DataError("is missing or unreadable", fix=_AGAIN, file=path) from None
    return results


def _settings_of(cell: Path) -> dict[str, Any]:
    """What a page says of a cell's settings: its learning rate, and whether it is plain DP-SGD; empty if unknown."""
    if not cell.exists():
        return {}
    settings = read_json(cell)
    options = settings["options"]
    own_parts = {"clipper", "noise", "controller"} & set(options)
    plain = options.get("like", settings["mechanism"]) == PLAIN and not own_parts
    return {"learning_rate": settings["training"]["learning_rate"], "plain": plain}


def is_plain(result: Result) -> bool:
    """Whether a result is of DP-SGD with one fixed radius, under whichever label."""
    return bool(result.get("plain", result["mechanism"] == PLAIN))


def listed_cells(experiment: Path) -> list[str]:
    """The folder names of the cells that an experiment file lists.

    Raises: DataError if the file is missing, or lists none.
    """
    try:
        names = read_json(experiment)["cells"]
    except (OSError, ValueError, KeyError):
        raise DataError("is missing or not an experiment file", fix=_AGAIN, file=experiment) from None
    if not names:
        raise DataError("lists no cell", fix="give params.yaml a mechanism and an epsilon", file=experiment)
    return list(names)


# How far the runs of an experiment came, and which of them lie under an earlier name.


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
        other = read_cell(file, cell.plugins)
        if other is not None and other.settings == cell.settings and (change := changes(other.versions, cell.versions)):
            yield RenamedRun(cell.label, folder, _state(folder), change)


def _state(folder: Path) -> str:
    if is_finished(folder):
        return "finished"
    try:
        return f"stopped at release {read_ledger(RunFolder(folder).ledger).releases}"
    except (LedgerError, OSError):
        return "its ledger cannot be read"


# Cells that train side by side.


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

    A cell that is finished, that trains clients locally, that learns labels, or that trains the model's own weights has
    a group of its own.
    """
    alone = [
        cell
        for cell in cells
        if most == 1
        or is_finished(cell.directory)
        or federation(cell)
        or cell.task.classifies
        or cell.training.train != "lora"
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
