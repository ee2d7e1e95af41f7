"""Grid of cells: the folder of each, how far it is, and what it would cost to run, without running anything.

python -m tasks.grid names
python -m tasks.grid names --profile profiles/tiny.yaml
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dptune.core.errors import ConfigError, DataError
from dptune.core.settings import RECORD
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.records.parquet_file import read_batches
from dptune.training.models.model_names import path_of
from tasks.experiment.cell_list import renamed_runs, steps
from tasks.experiment.cells import Cell, federation, grid, is_finished
from tasks.paths import EVAL, PUBLIC_MODEL, PUBLIC_VALIDATION, TRAIN
from tasks.profile import PARAMS, merged_profile, read_profile
from tasks.settings.params import Settings, settings_of
from tasks.settings.strict import load_yaml
from tasks.stage import run_command

_DATA_STAGES = ("acquire", "split", "canaries", "validation", "pretrain")
_MAKE = f"run `dvc repro {' '.join(_DATA_STAGES[2:])}`, which makes the records and the model and trains no cell"


@dataclass(frozen=True)
class PlannedCell:
    """A cell, how far its run is, and what the whole run costs. Public.

    Attributes:
        state: "finished", "stopped at release 30", "new", or what is wrong.
        cost: what the run costs in all, such as "epsilon 2 (certified)"; "spent" for a finished one.
        releases: the number of releases of the whole run.
        left: how many of them are still to be made.
    """

    cell: Cell
    state: str
    cost: str
    releases: int
    left: int


def planned_cells(cells: Sequence[Cell]) -> list[PlannedCell]:
    """What each cell's folder holds, and what is left to do. Reads ledgers and the records' units, and no model."""
    return [_planned(cell) for cell in cells]


def _planned(cell: Cell) -> PlannedCell:
    folder = RunFolder(cell.directory)
    try:
        contents = read_ledger(folder.ledger) if folder.has_begun else None
    except (LedgerError, OSError):
        return PlannedCell(cell, "its ledger cannot be read", _cost(cell), 0, 0)
    if contents is None:
        whole = steps(cell, _units(cell))
        return PlannedCell(cell, "new", _cost(cell), whole, whole)
    if is_finished(cell.directory):
        return PlannedCell(cell, "finished", "spent", contents.releases, 0)
    whole = steps(cell, contents.header.units)
    state = f"stopped at release {contents.releases}"
    return PlannedCell(cell, state, _cost(cell), whole, max(0, whole - contents.releases))


def _cost(cell: Cell) -> str:
    if cell.epsilon is not None:
        return f"epsilon {cell.epsilon:g} ({cell.accounting})"
    return "no guarantee" if "accountant" not in cell.versions else "what its fixed noise costs"


def _units(cell: Cell) -> int:
    """The number of units of a run, the auditor's slots included, as ``prepare.units_of`` counts them."""
    clients = federation(cell)
    if clients is not None:
        return clients.clients
    return _units_of_records(cell.unit == RECORD, TRAIN.stat().st_mtime_ns) + cell.crafted


@cache
def _units_of_records(single: bool, _changed: int) -> int:
    keys = [batch.column("unit").to_numpy() for batch in read_batches(TRAIN, ("unit",))]
    every = np.concatenate([np.zeros(0, dtype=np.int64), *keys])
    return len(every) if single else len(np.unique(every))


def table(planned: Sequence[PlannedCell]) -> str:
    """The cells in a table of plain text."""
    rows = [("folder", "state", "whole run", "delta", "releases")]
    rows += [
        (one.cell.directory.as_posix(), one.state, one.cost, f"{one.cell.delta:g}", str(one.releases))
        for one in planned
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def summary(planned: Sequence[PlannedCell]) -> str:
    """One sentence: how many cells are finished, and what running the others makes and spends."""
    left = [one for one in planned if one.state != "finished"]
    finished = f"{len(planned) - len(left)} of {len(planned)} cells are finished"
    if not left:
        return f"{finished}: running the experiment again trains nothing and spends nothing."
    counted = [one for one in left if one.cell.epsilon is not None]
    budgets: dict[str, float] = {}
    for one in counted:
        budgets[one.cell.accounting] = budgets.get(one.cell.accounting, 0.0) + (one.cell.epsilon or 0.0)
    spends = [f"epsilon {total:g} by {name} accounting" for name, total in sorted(budgets.items())]
    delta = math.fsum(one.cell.delta for one in counted)
    price = f"spends at most {' and '.join(spends)}, added up, at delta {delta:g}" if counted else "calibrates no noise"
    others = len(left) - len(counted)
    rest = f"; {others} without a budget" if others else ""
    begun = sum(one.state.startswith("stopped") for one in left)
    going_on = f"; of {begun} stopped ones a part is spent already" if begun else ""
    made = sum(one.left for one in left)
    number = "one" if len(left) == 1 else len(left)
    return f"{finished}; running the other {number} makes {made} releases and {price}{rest}{going_on}."


def check_data(settings: Settings, content: Mapping[str, Any]) -> None:
    """Check that the records and the public model of these settings lie here: their digests are part of cells' names.

    Raises: DataError or ConfigError with the command that makes them.
    """
    for file in (TRAIN, EVAL, PUBLIC_VALIDATION):
        if not file.is_file():
            raise DataError("is missing, and its digest is part of every cell's name", fix=_MAKE, file=file)
    for name, model in settings.experiment.models.items():
        if model.revision is None and path_of(model.source) is None:
            own = Path(model.source).resolve() == PUBLIC_MODEL.resolve()
            fix = _MAKE if own else "give the folder of a checkpoint"
            raise ConfigError(f"experiment.models.{name}", f"{model.source} is not a folder", fix=fix)
    if changed := list(_changed_parameters(content)):
        problem = f"{', '.join(changed)}: the records or the model that lie here were made with other values"
        raise ConfigError(str(PARAMS), problem, fix=f"with these settings, {_MAKE}")


def _changed_parameters(content: Mapping[str, Any]) -> Iterator[str]:
    """Parameters of the stages that make data whose values are not those that DVC last ran the stages with.

    Where DVC has noted none, params.yaml's values count as those.
    """
    stages, lock = (_read(Path(name)).get("stages", {}) for name in ("dvc.yaml", "dvc.lock"))
    base = _read(PARAMS)
    for stage in _DATA_STAGES:
        noted = lock.get(stage, {}).get("params", {}).get(PARAMS.name)
        for name in stages.get(stage, {}).get("params", []):
            before = noted.get(name) if noted is not None else _value(base, name)
            if before != _value(content, name):
                yield name


def _read(path: Path) -> dict[str, Any]:
    found = load_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _value(content: Any, name: str) -> Any:
    for part in name.split("."):
        content = content.get(part) if isinstance(content, Mapping) else None
    return content


def names(
    what: Annotated[str, typer.Argument(metavar="names", help="names: a table of the cells' folders")],
    profile: Annotated[Path | None, typer.Option(help="a profile in place of params.yaml's values")] = None,
) -> None:
    """Print the folder of every cell of the grid, whether it is finished, and what it would cost. Runs nothing."""
    if what != "names":
        raise ConfigError(what, "is not a command of the grid", fix="write `python -m tasks.grid names`")
    content = merged_profile(profile) if profile else read_profile(PARAMS)
    settings = settings_of(content, str(profile or PARAMS))
    check_data(settings, content)
    cells = grid(settings)
    planned = planned_cells(cells)
    print(table(planned))
    print()
    for renamed in renamed_runs(cells):
        print(f"{renamed}.")
    print(summary(planned))


if __name__ == "__main__":
    run_command(names)
