"""The register of what was published from a set of records: every run and search, whose costs add up.

One file, the owner's (mode 0600), append-only and chained like a ledger. It knows records by a digest under a key of
its own, so that the same records are recognised, and nobody else can test a guess. A run or search counts from its
start: what becomes of it, or of its folder, changes nothing. Records that were edited in between are others to it; it
says so.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dptune.errors import ConfigError
from dptune.files import PRIVATE_FILE, fsync_directory, locked
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import GENESIS, LedgerError, encode, seal
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader

FILE = "spent.jsonl"


@dataclass(frozen=True)
class Spent:
    """One entry of the register.

    Attributes:
        records: keyed digest of the records.
        id: id of the search, or of the run.
        what: "search" or "run".
        epsilon: certified epsilon at ``delta``, recomputed from the entry.
    """

    records: str
    id: str
    what: str
    unit: str
    data: str
    epsilon: float
    delta: float


@dataclass(frozen=True)
class SpentTotal:
    """What the entries about the same records and unit cost together, by basic composition: epsilons and deltas add."""

    records: str
    data: str
    unit: str
    entries: int
    epsilon: float
    delta: float


class Register:
    """The register in a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def beside(cls, out: Path) -> Register:
        """The register of everything that was tuned into the folders beside ``out``."""
        return cls(out.absolute().parent / FILE)

    def add_search(self, records: str, certificate: SearchCertificate, *, again: bool = True) -> None:
        """Add a search, once. Durable when this returns.

        Args:
            records: digest of the records, unkeyed. Private.
            again: whether it may add to what these records paid before.

        Raises: ConfigError if they paid before and it may not; two searches that start together cannot both pass.
        """
        self._add(records, "search", certificate.id, certificate.to_dict(), again=again)

    def add_run(self, records: str, header: RunHeader, planned: Composition) -> None:
        """Add a run of its own with all releases that it plans, once. Durable when this returns.

        Args:
            records: digest of the records, unkeyed. Private.
        """
        releases = [[release.to_dict(), count] for release, count in planned.items()]
        self._add(records, "run", header.run_id, {"header": header.to_dict(), "releases": releases})

    def earlier(self, records: str, besides: str = "") -> list[Spent]:
        """The entries about these records, but for the one with the id ``besides``."""
        entries, salt = self._read()
        key = _keyed(records, salt)
        return [_priced(entry) for entry in entries if entry["records"] == key and entry["id"] != besides]

    def check(self, records: str, *, again: bool) -> None:
        """Raise ConfigError if something was published from these records before, unless ``again``."""
        if not again:
            _refuse(self.earlier(records))

    def totals(self) -> list[SpentTotal]:
        """What was spent on each set of records, by unit."""
        groups: dict[tuple[str, str], list[Spent]] = {}
        for one in map(_priced, self._read()[0]):
            groups.setdefault((one.records, one.unit), []).append(one)
        return [_total(unit, found) for (_, unit), found in groups.items()]

    def of_all_units(self) -> list[SpentTotal]:
        """What was spent on each set of records that paid for more than one unit, all units together.

        It is about what lies in one unit of each kind, such as a record in its customer: of a customer as a whole, what
        was paid by records says nothing.
        """
        groups: dict[str, list[Spent]] = {}
        for one in map(_priced, self._read()[0]):
            groups.setdefault(one.records, []).append(one)
        units = {records: list(dict.fromkeys(one.unit for one in found)) for records, found in groups.items()}
        return [
            _total(f"what lies in one {' and in one '.join(units[records])}", found)
            for records, found in groups.items()
            if len(units[records]) > 1
        ]

    def _add(self, records: str, what: str, identity: str, content: Mapping[str, Any], *, again: bool = True) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self.path.with_name(f".{self.path.name}.lock"), wait=True):
            if not self._lines():
                self._append({"kind": "register", "salt": secrets.token_hex(32)}, GENESIS)
            entries, salt = self._read()
            if any(entry["id"] == identity for entry in entries):
                return
            if not again:
                _refuse(self.earlier(records))
            entry = {"kind": what, "id": identity, "records": _keyed(records, salt), "content": dict(content)}
            self._append(entry, str(json.loads(self._lines()[-1])["chain"]))

    def _append(self, entry: Mapping[str, Any], chain: str) -> None:
        line, _ = seal(encode(entry), chain)
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY, PRIVATE_FILE)
            try:
                os.ftruncate(descriptor, sum(map(len, self._lines())))  # cuts off a line that nobody was told of
                os.lseek(descriptor, 0, os.SEEK_END)
                while line:
                    line = line[os.write(descriptor, line) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fsync_directory(self.path.parent)
        except OSError as error:
            problem = f"{self.path}: cannot be written ({error.strerror})"
            raise LedgerError(f"{problem}. Fix: free space, or make it writable; nothing was charged.") from None

    def _lines(self) -> list[bytes]:
        """All whole lines; the last one of a write that was cut off was never acknowledged.

        Raises: ConfigError if others can read the file: with its key they could test a guess of all records.
        """
        if not self.path.exists():
            return []
        if self.path.stat().st_mode & 0o077:
            raise ConfigError(str(self.path), "can be read by others", fix=f"find out by whom; `chmod 600 {self.path}`")
        return [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def _read(self) -> tuple[list[dict[str, Any]], str]:
        """The entries, and the key of the records' digests. Raises: LedgerError for an edited line."""
        entries, chain, salt = [], GENESIS, ""
        for number, raw in enumerate(self._lines(), start=1):
            try:
                record = json.loads(raw)
                stated = record.pop("chain")
                line, chain = seal(encode(record), chain)
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                stated, line = None, b""
            if stated != chain or raw != line or (number == 1) != (record.get("kind") == "register"):
                problem = f"{self.path}, line {number}: was edited"
                raise LedgerError(f"{problem}. Fix: restore the file; it is all that tells what was spent.")
            if number == 1:
                salt = str(record["salt"])
            else:
                entries.append(record)
        return entries, salt


def _refuse(earlier: list[Spent]) -> None:
    """Raise ConfigError if there is any earlier entry."""
    if earlier:
        problem = f"these records paid before ({said(earlier)}), and a search adds its own cost"
        raise ConfigError("search.again", problem, fix="set search.again, if both may be published")


def said(found: list[Spent]) -> str:
    """Earlier entries as a clause."""
    total, delta = sum(one.epsilon for one in found), sum(one.delta for one in found)
    times = "once, " if len(found) == 1 else f"{len(found)} times, together "
    return f"{times}epsilon {total:.4g} at delta {delta:g}"


def _total(unit: str, found: list[Spent]) -> SpentTotal:
    return SpentTotal(
        found[0].records,
        ", ".join(dict.fromkeys(one.data for one in found)),
        unit,
        len(found),
        sum(one.epsilon for one in found),
        sum(one.delta for one in found),
    )


def _keyed(records: str, salt: str) -> str:
    return blake2b(records.encode(), key=bytes.fromhex(salt), digest_size=16).hexdigest() if salt else ""


def _priced(entry: Mapping[str, Any]) -> Spent:
    """An entry, priced from what it holds. What another version wrote and this one cannot price has no bound."""
    content, what = entry["content"], str(entry["kind"])
    stated = content if what == "search" else content["header"]
    named = str(stated["unit"]), str(stated["data"])
    try:
        epsilon = _price_of(content, what)
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError):  # the line is whole: its chain was checked
        epsilon = math.inf
    return Spent(entry["records"], entry["id"], what, *named, epsilon, float(stated["delta"]))


def _price_of(content: Mapping[str, Any], what: str) -> float:
    if what == "search":
        return SearchCertificate.from_dict(content).certified
    header = RunHeader.from_dict(content["header"])
    planned: Composition = Counter({Release.from_dict(release): int(count) for release, count in content["releases"]})
    certified = header.price(planned).certified if planned else math.inf
    if header.renyi_filter is not None and header.epsilon is not None:  # it may move its noise, within the budget
        certified = max(certified, header.epsilon)
    return certified
