"""The register of what these records have cost, as studies write and read it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from dptune.files import write_json
from dptune.privacy.ledger_file import GENESIS, LedgerContents, LedgerError, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import CHARGES, RunFolder
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
    """The id of the run in a folder, by which the register counts it: its ledger's, or the one that was drawn for it.

    A run that was killed before ``register_plan`` counts once. One that may have had a ledger, and would begin another,
    is a new run: what the old one released stays released, so that the register counts both.
    """
    folder = RunFolder(directory)
    with suppress(LedgerError):  # a last line that was cut off; training refuses worse damage
        return read_ledger(folder.ledger).header.run_id
    known = json.loads(folder.cell.read_text(encoding="utf-8")) if folder.cell.exists() else {}
    if not known or (CHARGES in known and _begins(folder)):
        known = {"run_id": uuid4().hex}
        write_json(folder.cell, known)
    return str(known["run_id"])


def register_plan(directory: Path, records: str, study: str, header: RunHeader, planned: Composition) -> None:
    """Add a run of a study that is about to start, with all that it plans, once: killed, its ledger has no more.

    Args:
        directory: the run's folder, which says from here on that it may have a ledger.
        records: digest of the pipeline's records. Private.
        header: the run's, with the id that its ledger has.
    """
    Register(SPENT).add_cell(records, study, LedgerContents(header, planned, planned.total(), GENESIS, False))
    write_json(RunFolder(directory).cell, {"run_id": header.run_id, CHARGES: True})


def _begins(folder: RunFolder) -> bool:
    """Whether training would begin a ledger. It refuses to where a file relies on one that is missing."""
    whole = folder.ledger.exists() and b"\n" in folder.ledger.read_bytes()
    return not (whole or any(file.exists() for file in folder.released))


def paid_so_far() -> str | None:
    """The sentence that says what the pipeline's records have paid so far; None if they have paid nothing."""
    register, records = Register(SPENT), records_digest()
    earlier, others = register.earlier(records), register.elsewhere(records)
    here = f"these records paid before ({said(earlier)}); new cells add to that: `dptune spent {SPENT}`"
    return "; ".join([*([here] if earlier else []), *others]) or None
