"""The register of what these records have cost, as studies write and read it."""

from __future__ import annotations

from dataclasses import replace

from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import earlier_runs, spending_of
from dptune.privacy.spent import Register, said
from tasks.experiment.cells import Cell
from tasks.paths import SPENT
from tasks.split_records import records_digest


def register_cell(records: str, cell: Cell, ledger: LedgerContents) -> None:
    """Add a cell that trained to its end, once, and its runs that were set aside; a resumed one has the same ledger,
    and so the same entry.

    Args:
        records: ``records_digest`` before it trained. Private.
    """
    register = Register(SPENT)
    for folder in earlier_runs(cell.directory):
        if (spending := spending_of(folder)) is None:
            continue
        if spending.problem:
            register.add_lost_cell(records, cell.experiment, replace(ledger.header, run_id=folder.name))
        else:
            register.add_cell(records, cell.experiment, read_ledger(RunFolder(folder).ledger))
    register.add_cell(records, cell.experiment, ledger)


def paid_so_far() -> str | None:
    """The sentence that says what the pipeline's records have paid so far; None if they have paid nothing."""
    register, records = Register(SPENT), records_digest()
    earlier, others = register.earlier(records), register.elsewhere(records)
    here = f"these records paid before ({said(earlier)}); new cells add to that: `dptune spent {SPENT}`"
    return "; ".join([*([here] if earlier else []), *others]) or None
