"""The register of what was published from a set of records: every run and search, whose costs add up.

One file, the owner's (mode 0600), append-only and chained like a ledger. It knows records by a digest under a key of
its own, so that the same records are recognised, and nobody else can test a guess. A run or search counts from its
start: what becomes of it, or of its folder, changes nothing. An ensemble that answers prompts counts from its first
opening, with its whole budget. A cell of a study counts from the end of its training on, with what it released; before
that its ledger lies in its folder. An entry only ever grows: where the same run is added again with more releases, the
line of the larger entry follows, and counts. Records that were edited in between are others to it; it says so.

What it cannot tell is a copy: the folder of a run (or ensemble) that was copied half-way and finished twice has one id,
and counts once, though both released. Whoever finishes both must say so by hand.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dptune.digits import at_most
from dptune.errors import ConfigError, DptuneError
from dptune.files import PRIVATE_FILE, fsync_directory, locked
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import GENESIS, LedgerContents, LedgerError, encode, seal
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader

FILE = "spent.jsonl"
#: Where registers usually lie: that of `dptune tune`, and the pipeline's. Each has a key of its own.
USUAL_PLACES = (Path(FILE), Path("data") / FILE)
#: Unit of an ensemble whose guarantee is about all records of a shard at once.
SHARD = "shard"
#: End of the unit of a total that ensembles by shards count in, beside others.
IN_A_SHARD = ", and lies in one shard"


@dataclass(frozen=True)
class Spent:
    """One entry of the register.

    Attributes:
        records: keyed digest of the records.
        id: id of the search, or of the run.
        what: "search", "run", "cell" or "answers".
        epsilon: certified epsilon at ``delta``, computed from the entry; infinite where nothing bounds it.
        study: name of the study that the cell is of; empty for others.
        folder: name of the folder that a run began in; empty where the entry does not say.
        units: number of training units.
    """

    records: str
    id: str
    what: str
    unit: str
    data: str
    epsilon: float
    delta: float
    study: str = ""
    folder: str = ""
    units: int = 0


@dataclass(frozen=True)
class SpentPart:
    """Entries of one kind in a total: all searches, all runs, or the cells of one study.

    Attributes:
        bounded: what those with a finite epsilon cost together.
        unbounded: number of those that nothing bounds.
    """

    what: str
    study: str
    entries: int
    bounded: float
    unbounded: int

    def __str__(self) -> str:
        """The part as a clause."""
        return _clause(self.entries, self.bounded, self.unbounded)


@dataclass(frozen=True)
class SpentTotal:
    """What the entries about the same records and unit cost together, by basic composition: epsilons and deltas add.

    Attributes:
        folders: names of the folders that runs began in, as far as entries say.
        units: numbers of training units of the entries, each once.
    """

    records: str
    data: str
    unit: str
    entries: int
    epsilon: float
    delta: float
    parts: tuple[SpentPart, ...] = ()
    folders: tuple[str, ...] = ()
    units: tuple[int, ...] = ()


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

    def add_run(self, records: str, header: RunHeader, planned: Composition, *, folder: str = "") -> None:
        """Add a run of its own with all releases that it plans, once. Durable when this returns.

        Args:
            records: digest of the records, unkeyed. Private.
            folder: name of the folder that it works in, by which the owner tells it from others.
        """
        told = {"folder": folder} if folder else {}
        self._add(records, "run", header.run_id, _content(header, planned) | told)

    def add_answers(self, records: str, header: RunHeader, tokens: Composition) -> None:
        """Add an ensemble with all tokens that it may ever answer, once. Durable when this returns.

        Args:
            records: digest of the records that its shards were tuned on, unkeyed. Private.
            tokens: their releases; nothing where nobody can tell how many it answered, which nothing bounds.
        """
        self._add(records, "answers", header.run_id, _content(header, tokens))

    def add_cell(self, records: str, study: str, ledger: LedgerContents) -> None:
        """Add a cell of a study with all that it released, once. Durable when this returns.

        Args:
            records: digest of the records, unkeyed. Private.
            study: name of the study. Public.
        """
        told = {"study": study, "certified": str(ledger.epsilons.certified)}
        self._add(records, "cell", ledger.header.run_id, _content(ledger.header, ledger.composition) | told)

    def add_lost_cell(self, records: str, study: str, header: RunHeader) -> None:
        """Add a run of a cell whose ledger tells no longer what it released, once: nothing bounds it.

        Args:
            header: the cell's, with an id that the lost run is known by.
        """
        told = {"study": study, "certified": str(math.inf)}
        self._add(records, "cell", header.run_id, _content(header, Counter()) | told)

    def earlier(self, records: str, besides: Collection[str] = ()) -> list[Spent]:
        """The entries about these records, but for those with an id in ``besides``.

        Of cells it takes the epsilon that was written when they ended: many are too slow to price at every start.
        """
        entries, salt = self._read()
        key = _keyed(records, salt)
        mine = [entry for entry in entries if entry["records"] == key and entry["id"] not in {*besides}]
        return [_priced(entry, stated=True) for entry in mine]

    def check(self, records: str, *, again: bool) -> None:
        """Raise ConfigError if a run or search of these records was published before, unless ``again``.

        Cells of studies refuse nothing, for a study and the search after it are used together; their costs add up too.
        """
        if not again:
            _refuse(self.earlier(records))

    def warnings(self, records: str, besides: str = "", *, again: bool) -> list[str]:
        """What to tell who starts a search of records that paid before; nothing where ``check`` refuses it."""
        earlier = self.earlier(records, [besides])
        if not (again or all(one.what == "cell" for one in earlier)):
            return []
        here = f"these records paid before ({said(earlier)}); what this search costs adds to that"
        return [*([here] if earlier else []), *self.elsewhere(records)]

    @property
    def others(self) -> list[Path]:
        """The other registers in the usual places. Their keys differ, so that nothing adds up two of them."""
        return self._others(USUAL_PLACES)

    def _others(self, places: Iterable[Path]) -> list[Path]:
        """The registers in these places but for this one, each once."""
        found = {path.resolve(): path for path in reversed([*places]) if _may_be_there(path)}
        return [path for real, path in reversed(found.items()) if real != self.path.resolve()]

    def elsewhere(self, records: str, *places: Path) -> list[str]:
        """What to tell who adds to this register, where others know these records too.

        Args:
            places: where another register may lie, besides the usual places.
        """
        told = []
        for path in self._others([*USUAL_PLACES, *places]):
            try:
                earlier = Register(path).earlier(records)
            except (DptuneError, OSError) as error:  # such as that of another user
                told.append(f"{path} is another register, and what it knows of these records is unknown: {error}")
                continue
            if earlier:
                told.append(f"{path} is another register, where these records paid too ({said(earlier)}): add that up")
        return told

    def totals(self) -> list[SpentTotal]:
        """What was spent on each set of records, by unit."""
        groups: dict[tuple[str, str], list[Spent]] = {}
        for one in map(_priced, self._read()[0]):
            groups.setdefault((one.records, one.unit), []).append(one)
        return [_total(unit, found) for (_, unit), found in groups.items()]

    def of_all_units(self) -> list[SpentTotal]:
        """What was spent on each set of records that paid for more than one unit, all units together.

        It is about what is one unit of each kind, such as a customer who has a single record: of a customer with more,
        what was paid by records says nothing; and if one record leaves a customer who keeps others, the customer has
        changed, which for the guarantee about customers is two steps, out and in again. An ensemble by shards counts
        for whatever lies in one shard, as each record does; no line of a single unit but its own has it.
        """
        groups: dict[str, list[Spent]] = {}
        for one in map(_priced, self._read()[0]):
            groups.setdefault(one.records, []).append(one)
        units = {records: list(dict.fromkeys(one.unit for one in found)) for records, found in groups.items()}
        return [_total(_alike(units[records]), found) for records, found in groups.items() if len(units[records]) > 1]

    def _add(self, records: str, what: str, identity: str, content: Mapping[str, Any], *, again: bool = True) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        real = self.path.resolve()  # a link in a copy of the checkout: one lock for all who write the file
        with locked(real.with_name(f".{real.name}.lock"), wait=True):
            if not self._lines():
                self._append({"kind": "register", "salt": secrets.token_hex(32)}, GENESIS)
            entries, salt = self._read()
            key = _keyed(records, salt)
            known = next((entry for entry in entries if (entry["records"], entry["id"]) == (key, identity)), None)
            grown = dict(content) if known is None else _grown(known["content"], content, what)
            if grown is None:
                return
            if known is None and not again:
                _refuse(self.earlier(records))
            entry = {"kind": what, "id": identity, "records": key, "content": grown}
            self._append(entry, str(json.loads(self._lines()[-1])["chain"]))

    def _append(self, entry: Mapping[str, Any], chain: str) -> None:
        line, _ = seal(encode(entry), chain)
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY, PRIVATE_FILE)
            try:
                whole = b"".join(self._lines())
                kept = min(len(whole), os.fstat(descriptor).st_size)
                os.ftruncate(descriptor, kept)  # cuts off a line that nobody was told of
                os.lseek(descriptor, 0, os.SEEK_END)
                line = whole[kept:] + line  # a newline that was lost
                while line:
                    line = line[os.write(descriptor, line) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fsync_directory(self.path.resolve().parent)
        except OSError as error:
            problem = f"{self.path}: cannot be written ({error.strerror})"
            raise LedgerError(f"{problem}. Fix: free space, or make it writable; nothing was charged.") from None

    def _lines(self) -> list[bytes]:
        """All whole lines; the last one of a write that was cut off was never acknowledged.

        A last line that lacks its newline alone is whole: editors strip it. If nobody was told of it, it harms nobody.

        Raises: ConfigError if others can read the file: with its key they could test a guess of all records.
        """
        if not self.path.exists():
            return []
        if self.path.stat().st_mode & 0o077:
            raise ConfigError(str(self.path), "can be read by others", fix=f"find out by whom; `chmod 600 {self.path}`")
        *lines, last = self.path.read_bytes().split(b"\n")
        if _is_json(last):
            lines.append(last)
        return [line + b"\n" for line in lines]

    def _read(self) -> tuple[list[dict[str, Any]], str]:
        """The entries, the last line of each, and the key of the records' digests. Raises: LedgerError if edited."""
        entries: dict[tuple[str, str], dict[str, Any]] = {}
        chain, salt = GENESIS, ""
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
                entries[record["records"], record["id"]] = record
        return list(entries.values()), salt


def _may_be_there(path: Path) -> bool:
    """Whether a file is there, or nobody can tell: its folder may be another user's."""
    try:
        return path.is_file()
    except OSError:
        return True


def _is_json(line: bytes) -> bool:
    """Whether a line is whole JSON, which no shorter start of an entry's line is."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _content(header: RunHeader, composition: Composition) -> dict[str, Any]:
    releases = [[release.to_dict(), count] for release, count in composition.items()]
    return {"header": header.to_dict(), "releases": releases}


def _grown(known: Mapping[str, Any], content: Mapping[str, Any], what: str) -> dict[str, Any] | None:
    """The content with each release as often as that of the two has it that has it more often, and the dearer header.

    None where nothing is to be added: the known one has all of it already, is a search's, which counts as a whole from
    its start, or names no release, which nothing bounds.
    """
    before, now = _counts(known), _counts(content)
    both = before | now
    if not before:
        return None
    releases = [[json.loads(release), count] for release, count in both.items()]
    grown = {**content, "header": known["header"], "releases": releases}
    if encode(content["header"]) != encode(known["header"]):
        grown = max(grown, {**grown, "header": content["header"]}, key=lambda one: _dearness(one, what))
    if both == before and grown["header"] == known["header"]:
        return None
    if "certified" in grown:
        grown["certified"] = str(_epsilon_of(grown, what))
    return grown


def _dearness(content: Mapping[str, Any], what: str) -> tuple[float, float]:
    return _epsilon_of(content, what), float(content["header"]["delta"])


def _counts(content: Mapping[str, Any]) -> Counter[str]:
    """The count of each release by its line, which releases of another version have too."""
    return Counter({encode(release): int(count) for release, count in content.get("releases", ())})


def _refuse(earlier: list[Spent]) -> None:
    """Raise ConfigError if there is any earlier entry but cells of studies."""
    if any(one.what != "cell" for one in earlier):
        problem = f"these records paid before ({said(earlier)}), and a search adds its own cost"
        raise ConfigError("search.again", problem, fix="set search.again, if both may be published")


def said(found: list[Spent]) -> str:
    """Earlier entries as a clause."""
    total, delta = sum(one.epsilon for one in found), sum(one.delta for one in found)
    times = "once, " if len(found) == 1 else f"{len(found)} times, together "
    bounded = [one.epsilon for one in found if math.isfinite(one.epsilon)]
    known = f", {at_most(sum(bounded), 4)} without the {len(found) - len(bounded)} that nothing bounds"
    price = f"{times}epsilon {at_most(total, 4)} at delta {at_most(delta)}"
    return price + (known if 0 < len(bounded) < len(found) else "")


def _clause(entries: int, bounded: float, unbounded: int) -> str:
    if unbounded == entries:
        return f"{entries}, without bound"
    return f"{entries}, epsilon {at_most(bounded, 4)}" + (f" and {unbounded} without bound" if unbounded else "")


def _parts(found: list[Spent]) -> tuple[SpentPart, ...]:
    """Searches, runs and studies, each in the order of its first entry."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in found:
        groups.setdefault((one.what, one.study), []).append(one.epsilon)
    return tuple(
        SpentPart(what, study, len(own), math.fsum(filter(math.isfinite, own)), sum(map(math.isinf, own)))
        for (what, study), own in groups.items()
    )


def _alike(units: list[str]) -> str:
    """What all guarantees about these units, which are two or more, are about together."""
    others = [unit for unit in units if unit != SHARD]
    alike = " alike" if len(others) > 1 else ""
    return f"what is one {' and one '.join(others)}{alike}{'' if others == units else IN_A_SHARD}"


def _total(unit: str, found: list[Spent]) -> SpentTotal:
    return SpentTotal(
        found[0].records,
        ", ".join(dict.fromkeys(one.data for one in found)),
        unit,
        len(found),
        sum(one.epsilon for one in found),
        sum(one.delta for one in found),
        _parts(found),
        tuple(dict.fromkeys(one.folder for one in found if one.folder)),
        tuple(dict.fromkeys(one.units for one in found if one.units)),
    )


def _keyed(records: str, salt: str) -> str:
    return blake2b(records.encode(), key=bytes.fromhex(salt), digest_size=16).hexdigest() if salt else ""


def _priced(entry: Mapping[str, Any], *, stated: bool = False) -> Spent:
    """An entry, priced from what it holds.

    Args:
        stated: whether to take a cell's own figure in place of a computation.
    """
    content, what = entry["content"], str(entry["kind"])
    about = content if what == "search" else content["header"]
    named = str(about["unit"]), str(about["data"])
    epsilon = _epsilon_of(content, what, stated=stated)
    return Spent(
        entry["records"],
        entry["id"],
        what,
        *named,
        epsilon,
        float(about["delta"]),
        study=str(content.get("study", "")),
        folder=str(content.get("folder", "")),
        units=int(about.get("units", 0)),
    )


def _epsilon_of(content: Mapping[str, Any], what: str, *, stated: bool = False) -> float:
    """The certified epsilon; infinite for what another version wrote and this one cannot price."""
    try:
        return float(content["certified"]) if stated and what == "cell" else _price_of(content, what)
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError):  # the line is whole: its chain was checked
        return math.inf


def _price_of(content: Mapping[str, Any], what: str) -> float:
    if what == "search":
        return SearchCertificate.from_dict(content).certified
    header = RunHeader.from_dict(content["header"])
    planned: Composition = Counter({Release.from_dict(release): int(count) for release, count in content["releases"]})
    certified = header.price(planned).certified if planned else math.inf
    if what == "run" and header.renyi_filter is not None and header.epsilon is not None:
        # It may move its noise, within the budget. Of a cell the releases are those that it made.
        certified = max(certified, header.epsilon)
    return certified
