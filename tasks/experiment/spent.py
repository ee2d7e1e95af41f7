"""The register of what these records have cost, as studies write and read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import earlier_runs, spending_of
from dptune.privacy.spent import Register, said
from tasks.experiment.cells import Cell
from tasks.paths import SPENT
from tasks.split_records import records_digest


def register_cell(records: str, cell: Cell, ledger: LedgerContents) -> None:
    """Add a cell of an experiment that trained to its end; see ``register_run``.

    Args:
        records: ``records_digest`` before it trained. Private.
    """
    register_run(records, cell.experiment, cell.directory, ledger)


def register_run(records: str, study: str, directory: Path, ledger: LedgerContents) -> None:
    """Add a run of a study that trained to its end, once, and its runs that were set aside; a resumed one has the same
    ledger, and so the same entry.

    Args:
        records: digest of the pipeline's records before it trained. Private.
        directory: the run's folder.
    """
    register = Register(SPENT)
    for folder in earlier_runs(directory):
        if (spending := spending_of(folder)) is None:
            continue
        if spending.problem:
            register.add_lost_cell(records, study, replace(ledger.header, run_id=folder.name))
        else:
            register.add_cell(records, study, read_ledger(RunFolder(folder).ledger))
    register.add_cell(records, study, ledger)


def paid_so_far() -> str | None:
    """The sentence that says what the pipeline's records have paid so far; None if they have paid nothing."""
    register, records = Register(SPENT), records_digest()
    earlier, others = register.earlier(records), register.elsewhere(records)
    here = f"these records paid before ({said(earlier)}); new cells add to that: `dptune spent {SPENT}`"
    return "; ".join([*([here] if earlier else []), *others]) or None
