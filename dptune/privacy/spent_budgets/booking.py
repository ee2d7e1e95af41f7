"""Booking of a run: which records pay for it, and the register that counts it; and ledgers that no register counts.

``booking.json`` in the run's folder names both, so that a ledger whose line the register has lost still counts for its
records. It is private: with the digest in it, anybody could test a guess of all records.
"""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import read_json, write_json
from dptune.privacy.certificate import read_certificate
from dptune.privacy.ledger_file import LedgerError, first_header, is_complete
from dptune.privacy.run_folder import CHARGES, FOLDER, RunFolder, Spending, certificate_of, spending_of, unknown_cost
from dptune.privacy.spent_budgets.totals import Spent, said

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


# Ledgers and certificates that lie beside a register and that no line of it names.
#
# A register whose last lines were cut off, or that was removed or replaced, looks whole; what lies beside it does not.
# A run counts in its register before its ledger begins, so that such a ledger was counted once, or came from elsewhere.


#: How deep below a register's folder ledgers are looked for, and where else: a run is data/runs/<run>, for example.
_DEPTH, _KEPT_DEEPER = 2, Path("policy", "rlhf")
#: Name of the register beside a run's folder, where nothing else was asked for.
_USUAL = "spent.jsonl"
#: Largest number of folders that are looked into: a register may lie in a home directory.
MOST = 5_000
_SEARCHING = ".searching"
#: Largest number of folders that a sentence names.
_LISTED = 4
#: Units of simulated users and tenants, who are in no register.
_SIMULATED = ("user", "tenant")


@dataclass(frozen=True)
class Beside:
    """A ledger or certificate beside a register.

    Attributes:
        folder: the folder that holds it, or that lacks the ledger that it had.
        ids: ids by which a register may know it.
        what: "search", "run", "cell" or "answers", as in a register.
        study: name of the study that a cell is of; empty for others.
        booking: what the run's folder says of its records and register; None where it says nothing.
    """

    folder: Path
    ids: tuple[str, ...]
    what: str
    study: str
    booking: Booking | None

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return _owner_of(self.folder).name

    @property
    def file(self) -> Path:
        """The ledger or certificate, which may be missing."""
        return certificate_of(self.folder) or RunFolder(self.folder).ledger

    @property
    def spending(self) -> Spending | None:
        """What was charged, or may still be without another look at the register; None if nothing was.

        A run or ensemble that has not ended counts with its whole budget, as it would in its register; a cell and what
        has ended, with what was released.
        """
        if self.what == "search" and not _has_candidates(self.file):
            return None  # it begins when the first of them does
        spent = _spending_of(self.folder, _state_of(self.folder))
        if (
            spent is None
            and _json_of(RunFolder(self.folder).cell).get(CHARGES)
            and not RunFolder(self.folder).has_begun
        ):
            return unknown_cost(self.folder, "its ledger is missing")
        header = first_header(RunFolder(self.folder).ledger)
        if spent is None or header is None or self.ended or self.what not in ("run", "answers"):
            return spent
        return replace(spent, epsilon=max(spent.epsilon, header.epsilon or 0.0))

    @property
    def is_candidate(self) -> bool:
        """Whether it is a candidate's ledger beside which no certificate lies: nothing bounds what such a one tells."""
        return self.what == "search" and certificate_of(self.folder) is None

    @property
    def ended(self) -> bool:
        """Whether nothing will be added to it."""
        return self.what == "search" or is_complete(RunFolder(self.folder).ledger)

    @property
    def may_be_named(self) -> bool:
        """Whether its line can be written again: it has ended, and its folder says which records paid."""
        spent = self.spending
        known = spent is not None and not spent.problem and not self.is_candidate
        return self.booking is not None and self.ended and known

    def entry(self, records: str) -> list[Spent]:
        """What it has cost, as an entry of a register; none if nothing was charged to it.

        Args:
            records: keyed digest of its records; empty where its folder does not say which paid.
        """
        if (spent := self.spending) is None:
            return []
        about = spent.unit or "unknown", spent.data or "unknown"
        entry = Spent(records, self.ids[0], self.what, *about, spent.epsilon, spent.delta, self.study, self.name)
        return [replace(entry, named=False)]


def ledgers_beside(places: Iterable[Path]) -> Iterator[Beside]:
    """Find the ledgers and certificates in these folders and below them, but for candidates whose search is there."""
    found = []
    for folder in _folders(places):
        with suppress(OSError):  # of another user
            found.append(_look(folder))
    certified = {one.ids for one in found if one is not None and not one.is_candidate}
    yield from (one for one in found if one is not None and not (one.is_candidate and one.ids in certified))


def registers_of(found: Iterable[Beside]) -> list[Path]:
    """The registers that the folders of ledgers name; of those that name none, the one that usually lies beside it."""
    usual = ((one, _owner_of(one.folder).with_name(_USUAL)) for one in found)
    return list(dict.fromkeys(one.booking.register if one.booking else beside for one, beside in usual))


def fault(register: Path, missing: Sequence[Beside], spent: list[Spent], *, lines: bool) -> str:
    """The sentence about ledgers that a register does not name.

    Args:
        spent: what they cost.
        lines: whether the register names any run.
    """
    names = {entry.folder for entry in spent}
    again = {one.name for one in missing if one.may_be_named} & names
    cells = {one.name for one in missing if one.what == "cell"} & names - again
    fixes = [f"`dptune spent {shlex.quote(str(register))} --restore` names {_listed(again)} again"] if again else []
    if others := names - again - cells:
        fixes.append(f"restore a copy of it, or run the command of {_listed(others)} again, which counts what it finds")
    if cells:
        fixes.append(f"keep {_listed(cells)}, whose ledgers count where they lie")
    if others or cells:
        fixes.append("move away what is of other records")
    state = "" if lines else " is empty" if register.exists() else " is missing"
    price = said([replace(entry, named=True) for entry in spent])
    problem = f"{register}{state}: no line names what lies in {_listed(names)} ({price})"
    why = "lines were cut off, it was removed or replaced, or that came from elsewhere"
    return f"{problem}: {why}. It counts. Fix: {'; '.join(fixes)}."


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(sorted(names)[:_LISTED]) + more


def _folders(places: Iterable[Path]) -> Iterator[Path]:
    """The folders and those below them, the nearest first; runs within a run too."""
    given = dict.fromkeys(place.resolve() for place in places)
    waiting = deque([*((place, 0) for place in given), *((place / _KEPT_DEEPER, _DEPTH - 1) for place in given)])
    seen: set[Path] = set()
    while waiting and len(seen) < MOST:
        folder, depth = waiting.popleft()
        if (real := folder.resolve()) in seen:
            continue
        seen.add(real)
        try:
            entries = {entry.name: entry.is_dir() for entry in os.scandir(folder)}
        except OSError:
            continue
        yield folder
        if "pyvenv.cfg" in entries or (depth and folder.name.startswith(".")):
            continue  # a hidden folder may be a run's; candidates are not counted one by one
        for name in sorted(name for name, is_folder in entries.items() if is_folder):
            if depth < _DEPTH or FOLDER in (name, folder.name):
                waiting.append((folder / name, depth + 1))


def _look(folder: Path) -> Beside | None:
    """What lies in one folder."""
    owner = _owner_of(folder)
    run = RunFolder(owner)
    if (certificate := certificate_of(folder)) is not None:
        try:
            ids = (read_certificate(certificate).id,)
        except LedgerError:
            ids = (owner.name,)  # it counts as infinite
        return Beside(folder, ids, "search", "", _booking_of(owner))
    ledger, cell = RunFolder(folder).ledger, _json_of(run.cell)
    header = first_header(ledger) if ledger.is_file() else None
    booking = _booking_of(owner)
    if header is not None and header.search:
        return Beside(folder, (header.search,), "search", "", booking)
    # A study's cell may have a column of such a name; nobody's records have neither settings nor a booking of a run.
    if header is not None and header.unit in _SIMULATED and not (cell or booking):
        return None
    if not ledger.exists() and not (owner == folder and cell.get(CHARGES)):
        return None
    # Where the ledger is damaged or missing, a register may know the id in the folder's notes, or the folder's name.
    noted = [str(one) for one in (cell.get("run_id"), _json_of(run.served).get("run_id"), owner.name) if one]
    what, study = _kind_of(run, cell)
    return Beside(folder, (header.run_id,) if header else tuple(noted), what, study, booking)


def _booking_of(owner: Path) -> Booking | None:
    with suppress(ConfigError):  # a damaged one says no more than one that is missing
        return read_booking(owner)
    return None


def _owner_of(folder: Path) -> Path:
    """The run's folder, of the folder of its weights or the secret one of a search too."""
    if folder.name.startswith(".") and folder.name.endswith(_SEARCHING):
        return folder.with_name(folder.name.removeprefix(".").removesuffix(_SEARCHING))
    inside = RunFolder(folder.parent)
    return folder.parent if folder == inside.adapter and inside.cell.exists() else folder


def _has_candidates(certificate: Path) -> bool:
    """Whether a candidate of a search has begun, or the search has ended."""
    working = certificate.parent
    return not working.name.endswith(_SEARCHING) or any(working.glob("*/*/ledger.jsonl"))


def _kind_of(run: RunFolder, cell: dict[str, Any]) -> tuple[str, str]:
    if cell.get("kind") == "run" or "salt" in cell:
        return "run", ""
    if cell:
        return "cell", str(cell.get("experiment", ""))
    return ("answers" if run.served.exists() else "run"), ""


def _json_of(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _state_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a folder's files, by which a price that was computed stays known."""
    found = []
    for one in os.scandir(folder):
        with suppress(FileNotFoundError):  # a link to nothing, or a file that has just gone
            state = one.stat()
            found.append((one.name, state.st_size, state.st_mtime_ns))
    return tuple(sorted(found))


@lru_cache(maxsize=1024)  # some ledgers take seconds to price, and a start asks more than once
def _spending_of(folder: Path, state: tuple[tuple[str, int, int], ...]) -> Spending | None:
    return spending_of(folder)
