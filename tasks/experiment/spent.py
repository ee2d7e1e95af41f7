"""The register of what these records have cost, as studies write and read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from dptune.files import write_json
from dptune.privacy.ledger_file import GENESIS, LedgerContents, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.privacy.set_aside import earlier_runs, spending_of
from dptune.privacy.spent import Register, said
from tasks.experiment.cells import Cell
from tasks.paths import SPENT
from tasks.split_records import records_digest


def register_cell(records: str, cell: Cell, ledger: LedgerContents) -> None:
    """Add a cell of an experiment that trained to its end, once, and its runs that were set aside; a resumed one has
    the same ledger, and so the same entry.

    Args:
        records: ``records_digest`` before it trained. Private.
    """
    register, study = Register(SPENT), cell.experiment
    for folder in earlier_runs(cell.directory):
        if (spending := spending_of(folder)) is None:
            continue
        if spending.problem:
            register.add_lost_cell(records, study, replace(ledger.header, run_id=folder.name))
        else:
            register.add_cell(records, study, read_ledger(RunFolder(folder).ledger))
    register.add_cell(records, study, ledger)


def run_id_of(directory: Path) -> str:
    """The id of the run in a folder, drawn once: a run that is killed before its ledger begins counts once as well."""
    cell = RunFolder(directory).cell
    if not cell.exists():
        write_json(cell, {"run_id": uuid4().hex})
    return str(json.loads(cell.read_text(encoding="utf-8"))["run_id"])


def register_plan(records: str, study: str, header: RunHeader, planned: Composition) -> None:
    """Add a run of a study that is about to start, with all that it plans, once: killed, its ledger has no more.

    Args:
        records: digest of the pipeline's records. Private.
        header: the run's, with the id that its ledger has.
    """
    Register(SPENT).add_cell(records, study, LedgerContents(header, planned, planned.total(), GENESIS, False))


def paid_so_far() -> str | None:
    """The sentence that says what the pipeline's records have paid so far; None if they have paid nothing."""
    register, records = Register(SPENT), records_digest()
    earlier, others = register.earlier(records), register.elsewhere(records)
    here = f"these records paid before ({said(earlier)}); new cells add to that: `dptune spent {SPENT}`"
    return "; ".join([*([here] if earlier else []), *others]) or None
