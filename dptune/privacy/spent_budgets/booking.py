"""The booking of a run: which records pay for it, and the register that counts it.

``booking.json`` in the run's folder names both, so that a ledger whose line the register has lost still counts for its
records. It is private: with the digest in it, anybody could test a guess of all records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dptune.core.errors import ConfigError
from dptune.core.files import read_json, write_json
from dptune.privacy.run_folder import CHARGES, RunFolder

FILE = RunFolder(Path()).booking.name


@dataclass(frozen=True)
class Booking:
    """What a run's folder says of its register.

    Attributes:
        records: digest of all records, those of other sides of a split included. Private.
        register: file of the register.
    """

    records: str
    register: Path


def write_booking(folder: Path, records: str, register: Path) -> None:
    """Write down for which records a run pays, and where.

    Args:
        records: ``fingerprint`` of all records, those of empty shards and of other sides of a split included. Private.
        register: file of the register, which need not exist yet.
    """
    way = os.path.relpath(register.resolve(), folder.resolve())  # a run may be moved together with its register
    file, said = RunFolder(folder).booking, {"records": records, "register": way}
    with suppress(OSError, ValueError):
        if read_json(file) == said:
            return  # a finished search is left as it is, times of files included
    write_json(file, said)


def read_booking(folder: Path) -> Booking | None:
    """Read the booking of a run; None if the folder has none. Raises: ConfigError for a damaged one."""
    file = RunFolder(folder).booking
    if not file.exists():
        return None
    try:
        known = read_json(file)
        records, way = str(known["records"]), str(known["register"])
    except (OSError, ValueError, KeyError, TypeError):
        fix = "restore it; or write it again with dptune.privacy.spent_budgets.booking.write_booking"
        raise ConfigError(str(file), "is damaged", fix=fix) from None
    return Booking(records, Path(os.path.normpath(folder.resolve() / way)))


@contextmanager
def booked(folder: RunFolder, records: str, register: Path, add: Callable[[], None]) -> Iterator[None]:
    """Context in which the first line of a run's ledger is written, or that of a ledger which is resumed.

    Killed before the ledger has its line, the run begins again under the id that its folder holds, and counts once.
    From the first line on the folder says that there is a ledger: whoever removes it begins another run, which counts
    too.

    Args:
        add: adds the run to the register, once.

    Raises: what ``add`` does; the ledger is then not begun.
    """
    write_booking(folder.path, records, register)
    add()
    yield
    if CHARGES not in (known := folder.settings):
        write_json(folder.cell, known | {CHARGES: True})
