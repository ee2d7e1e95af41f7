"""An ensemble in the register of its records: its whole budget counts before the first answer."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dptune.core.errors import ConfigError
from dptune.core.files import read_json
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder, earlier_runs, spending_of
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.booking import FILE, read_booking, write_booking
from dptune.privacy.spent_budgets.register import Register, said

__all__ = ["FILE", "book", "write_booking"]


def book(
    ensemble: Path, header: RunHeader, tokens: Composition, register: Path | None = None, *, answered: bool = False
) -> list[str]:
    """Count an ensemble in the register, with its runs that were set aside. Durable when this returns.

    Args:
        header: header of the ensemble's ledger.
        tokens: releases of all tokens that it may ever answer.
        register: file of the register; None takes the one that the booking names.
        answered: whether it has answered before, so that the register which its booking names should be there.

    Returns: what the owner of the records should know, in sentences.

    Raises: ConfigError for a damaged booking, or one whose register was left behind; LedgerError if the register is
        damaged or cannot be written.
    """
    if (booking := read_booking(ensemble)) is None:
        problem = f"{ensemble} does not say which records it was tuned on, so no register counts its answers"
        return [f"{problem}: dptune.prediction.booking.write_booking says it"]
    records, named = booking.records, booking.register
    found = Register(register or named)
    try:
        if register is None and answered and not named.exists():
            problem = f"names the register {named}, which is missing; a new register would lack its entries"
            raise ConfigError(
                str(RunFolder(ensemble).booking),
                problem,
                fix="restore it, or give --register FILE (a new file is allowed)",
            )
        found.add_answers(records, header, tokens)
        for folder in earlier_runs(ensemble):
            _book_earlier(found, records, folder, header)
    except OSError as error:
        problem = f"{found.path}: cannot be written ({error.strerror}), and every answer must be counted there first"
        raise LedgerError(f"{problem}. Fix: make it writable, or give --register FILE; nothing was answered.") from None
    earlier = found.earlier(records, besides=[header.run_id])
    before = f"these records paid before ({said(earlier)}); answers add to that: dptune spent {found.path}"
    return [*([before] if earlier else []), *found.elsewhere(records, named)]


def _book_earlier(register: Register, records: str, folder: Path, header: RunHeader) -> None:
    """Count a run that was set aside: nothing new, if it was opened since there are bookings."""
    if (spending := spending_of(folder)) is None:
        return
    if spending.problem:
        register.add_answers(records, replace(header, run_id=_run_id(folder)), Counter())
        return
    contents = read_ledger(RunFolder(folder).ledger)
    register.add_answers(records, contents.header, contents.composition)


def _run_id(folder: Path) -> str:
    """The id of a run without its ledger, from the note beside it; without that the folder's name."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(read_json(RunFolder(folder).served)["run_id"])
    return folder.name
