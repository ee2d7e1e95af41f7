"""The register of what these records have cost, as studies write and read it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from dptune.core.files import write_json
from dptune.privacy.ledger import Booked
from dptune.privacy.ledger_file import GENESIS, LedgerContents, first_header, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder, earlier_runs, spending_of
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.booking import booked, write_booking
from dptune.privacy.spent_budgets.register import Register, said
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


def note_records(directory: Path, records: str) -> None:
    """Write down which records a cell pays for, before it trains: until it ends, its ledger alone counts.

    Args:
        records: ``records_digest``. Private.
    """
    if not RunFolder(directory).booking.exists():  # a resumed one has read its records before
        write_booking(directory, records, SPENT)


def run_id_of(directory: Path) -> str:
    """The id of the run in a folder, by which the register counts it: its ledger's, or the one that was drawn for it.

    A run that was killed before its ledger's first line counts once. One that had a ledger, and would begin another, is
    a new run: what the old one released stays released, so that the register counts both.
    """
    folder = RunFolder(directory)
    if (begun := first_header(folder.ledger)) is not None:
        return begun.run_id
    if not (known := folder.settings) or folder.lost_its_ledger:
        known = {"run_id": uuid4().hex}
        write_json(folder.cell, known)
    return str(known["run_id"])


def plan_booking(directory: Path, records: str, study: str, header: RunHeader, planned: Composition) -> Booked:
    """Make what counts a run of a study with all that it plans, once, when its ledger begins.

    A run whose ledger has begun counts at once: the register may have been cut since. Killed, its ledger has no more.

    Args:
        directory: the run's folder, which says from then on that it has a ledger.
        records: digest of the pipeline's records. Private.
        header: the run's, with the id that its ledger has.
    """
    folder, register = RunFolder(directory), Register(SPENT)
    plan = LedgerContents(header, planned, planned.total(), GENESIS, False)
    booking = partial(booked, folder, records, SPENT, partial(register.add_cell, records, study, plan))
    if first_header(folder.ledger):
        with booking():
            pass
    return booking


def paid_so_far(*, private: bool = False) -> str | None:
    """The sentence that says what the pipeline's records have paid so far; None if they have paid nothing.

    Args:
        private: whether to say only what is wrong with the register: what these very records paid is then private.
    """
    register = Register(SPENT)
    if private:
        return "; ".join(register.faults()) or None
    records = records_digest()
    earlier, others = register.earlier(records), register.elsewhere(records)
    here = f"these records paid before ({said(earlier)}); new cells add to that: `dptune spent {SPENT}`"
    return "; ".join([*([here] if earlier else []), *others]) or None
