"""Audit plan: the cells that are audited together. Processes share them, and a kill costs one audit of each.

python -m tasks.audit.audit_plan data/audit_plan.json PART PARTS [--device cuda:0]
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from dptune.core.files import private_directory, write_text
from tasks.audit.attacks import audit_cell, audit_file, audit_key
from tasks.paths import RUNS
from tasks.settings.experiment import Audit
from tasks.settings.strict import StrictModel, read_plan
from tasks.shared_work import make_part
from tasks.stage import run_command

AUDIT_PLAN = "audit_plan.json"
#: What a process says, before the cell's name, once it has audited a cell.
MADE = "audited the cell"
_log = logging.getLogger(__name__)


class AuditPlan(StrictModel):
    """The cells of one experiment, by the names of their folders, and the settings of their audits. Public."""

    cells: list[str]
    settings: Audit

    def seeds(self, cell: str) -> int:
        """Number of cells that differ from ``cell`` by their seed alone, itself included."""
        return sum(_without_seed(one) == _without_seed(cell) for one in self.cells)

    def is_made(self, cell: str) -> bool:
        """Whether the cell's audit is there, and of this run, these settings, and as many cells beside it."""
        made_of = _made_of(cell)
        return audit_file(RUNS / cell).exists() and made_of.exists() and made_of.read_text() == self._key(cell)

    def make(self, cell: str, device: str) -> None:
        """Attack one cell. Raises: DataError as ``audit_cell``."""
        _made_of(cell).unlink(missing_ok=True)
        audit_cell(RUNS / cell, self.settings, device, len(self.cells), self.seeds(cell))
        write_text(_made_of(cell), self._key(cell))

    def _key(self, cell: str) -> str:
        return f"{audit_key(RUNS / cell, self.settings)} {len(self.cells)} {self.seeds(cell)}"


def _without_seed(cell: str) -> str:
    """The label of a cell up to its seed; cells whose folders have other names count as one."""
    return cell.rpartition(".seed")[0]


def _made_of(cell: str) -> Path:
    """The file that says what the audit beside it is of. Private: its digest covers the records."""
    return private_directory(audit_file(RUNS / cell).parent) / "made_of.txt"


def audit_part(plan: AuditPlan, part: int, parts: int, device: str) -> None:
    """Audit the cells that have no audit yet and that no other process audits. Raises: as ``make_part``."""

    def make(cell: str) -> None:
        plan.make(cell, device)
        _log.info("%s %s", MADE, cell)

    # The last cell first: studies list learned controllers last, whose twins take minutes, and one that began when all
    # others were done would keep the rest of the machine idle.
    make_part(
        "cell",
        plan.cells[::-1],
        part,
        parts,
        lock=lambda cell: _made_of(cell).with_name("lock"),
        is_made=plan.is_made,
        make=make,
    )


def main(
    plan: Annotated[Path, typer.Argument(help="audit_plan.json, which the flow writes")],
    part: Annotated[int, typer.Argument(help="number of the part, from 0")],
    parts: Annotated[int, typer.Argument(help="number of parts")],
    device: Annotated[str, typer.Option(help="torch device")] = "cpu",
) -> None:
    """Audit the cells of a plan that nobody has audited, beside the processes of the other parts."""
    audit_part(read_plan(AuditPlan, plan, "audit"), part, parts, device)


if __name__ == "__main__":
    run_command(main)
