"""The register of what was published from a set of records: every run and search, whose costs add up.

One file, the owner's (mode 0600), append-only and chained like a ledger (``register_file``). It knows records by a
digest under a key of its own, so that the same records are recognised, and nobody else can test a guess. A run or
search counts from the moment on in which its ledger begins: what becomes of it, or of its folder, changes nothing. An
ensemble that answers prompts counts from its first opening, with its whole budget. A cell of a study counts from the
end of its training on, with what it released; before that its ledger lies in its folder. An entry only ever grows:
where the same run is added again with more releases, the line of the larger entry follows, and counts. Records that
were edited in between are others to it; it says so. Ledgers and certificates that lie beside it (``booking``) and
that no line names count too: the register was cut, or replaced, or a cell has not ended.

What it cannot tell is a copy: the folder of a run (or ensemble) that was copied half-way and finished twice has one id,
and counts once, though both released. Whoever finishes both must say so by hand.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import locked
from dptune.privacy.certificate import SearchCertificate, read_certificate
from dptune.privacy.ledger_file import LedgerContents, LedgerError, encode
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import read_acknowledged
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.booking import Beside, fault, ledgers_beside, registers_of
from dptune.privacy.spent_budgets.register_file import DamagedRegisterError, append_line, read_lines, whole_lines
from dptune.privacy.spent_budgets.totals import (
    IN_A_SHARD,
    SHARD,
    Spent,
    SpentPart,
    SpentTotal,
    _epsilon_of,
    _priced,
    dearest,
    said,
    totals_of,
    totals_of_all_units,
)

__all__ = ["IN_A_SHARD", "SHARD", "Register", "Spent", "SpentPart", "SpentTotal", "said"]

FILE = "spent.jsonl"
#: Where registers usually lie: that of `dptune tune`, and the pipeline's. Each has a key of its own.
USUAL_PLACES = (Path(FILE), Path("data") / FILE)


class Register:
    """The register in a file, which need not exist yet.

    Attributes:
        path: the file.
        beside_too: folders in which ledgers are looked for, besides the file's own.

    Example:
        >>> from collections import Counter
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.run_header import RunHeader
        >>> from dptune.privacy.spent_budgets.register import Register, said
        >>> register = Register(Path(mkdtemp()) / "spent.jsonl")
        >>> header = RunHeader("static", "gdp_clt", "certified", epsilon=2.0, delta=1e-5, unit="record", units=800)
        >>> register.add_run("digest of the records", header, Counter({Release(0.01, 1.0): 1000}), folder="tuned")
        >>> said(register.earlier("digest of the records"))
        'once, epsilon 1.83 at delta 1e-05'
        >>> register.earlier("digest of other records")
        []
    """

    def __init__(self, path: Path, *beside_too: Path) -> None:
        self.path = path
        self.beside_too = beside_too

    @classmethod
    def beside(cls, out: Path, path: str | Path | None = None) -> Register:
        """The register of everything that was tuned into the folders beside ``out``, in the file ``path`` if given."""
        folder = out.absolute().parent
        return cls(folder / FILE if path is None else Path(path), folder)

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

        Ledgers beside it that no line names are among them, unless their folders say that other records paid. Of cells
        it takes the epsilon that was written when they ended: many are too slow to price at every start.
        """
        found = self._beside()
        entries, salt = self._read()
        key = _keyed(records, salt)
        mine = [_priced(one, stated=True) for one in _grown_by(found, entries) if one["records"] == key]
        for one in self._unnamed(found, entries):
            if one.booking is None or one.booking.records == records:
                mine += one.entry(key)
        return [one for one in dearest(mine) if one.id not in {*besides}]

    def check(self, records: str, *, again: bool) -> None:
        """Raise ConfigError if a run or search of these records was published before, unless ``again``.

        Cells of studies refuse nothing, for a study and the search after it are used together; their costs add up too.
        """
        if not again:
            _refuse(self.earlier(records))

    def warnings(self, records: str, besides: str = "", *, again: bool) -> list[str]:
        """Warnings for starting a search on records that already spent budget; none where ``check`` refuses it."""
        earlier = self.earlier(records, [besides])
        if not (again or all(one.what == "cell" for one in earlier)):
            return []
        here = f"these records paid before ({said(earlier)}); the cost of this search adds to that"
        return [*([here] if earlier else []), *self.elsewhere(records)]

    @property
    def others(self) -> list[Path]:
        """The other registers in the usual places, and those that count ledgers beside this one. Their keys differ, so
        that nothing adds up two of them."""
        return self._others([*USUAL_PLACES, *registers_of(self._beside())])

    def _others(self, places: Iterable[Path]) -> list[Path]:
        """The registers in these places but for this one, each once."""
        found = {path.resolve(): path for path in reversed([*places]) if _may_be_there(path)}
        return [path for real, path in reversed(found.items()) if real != self.path.resolve()]

    def elsewhere(self, records: str, *places: Path) -> list[str]:
        """Warnings for adding to this register where others know these records too, or it lost lines of its own.

        Args:
            places: where another register may lie, besides ``others``.
        """
        told = []
        for path in self._others([*USUAL_PLACES, *places, *registers_of(self._beside())]):
            try:
                earlier = Register(path).earlier(records)
            except (DptuneError, OSError) as error:  # such as that of another user
                told.append(f"{path} is another register, and its entries about these records cannot be read: {error}")
                continue
            if earlier:
                told.append(
                    f"{path} is another register, where these records paid too ({said(earlier)}): add both totals"
                )
        return [*told, *self.faults()]

    def faults(self) -> list[str]:
        """Say which ledgers lie beside the register and are not in it, though they should be; with the fix.

        A cell that has not ended is in none, and no fault.
        """
        found = self._beside()
        entries, salt = self._read() if found else ([], "")
        missing = [one for one in self._unnamed(found, entries) if one.what != "cell" or one.ended]
        spent = dearest(entry for one in missing for entry in one.entry(_key_of(one, salt)))
        return [fault(self.path, missing, spent, lines=bool(entries))] if spent else []

    def restore(self) -> list[str]:
        """Add what has ended beside the register and is not in it, where its folder says which records paid.

        Returns: names of the folders.
        """
        found = self._beside()
        missing = [one for one in self._unnamed(found, self._read()[0]) if one.may_be_named]
        for one in missing:
            assert one.booking is not None  # ``may_be_named``
            if one.what == "search":
                self.add_search(one.booking.records, read_certificate(one.file))
                continue
            contents = read_acknowledged(one.file)
            if one.what == "cell":
                self.add_cell(one.booking.records, one.study, contents)
                continue
            told = _content(contents.header, contents.composition) | {"folder": one.name}
            self._add(one.booking.records, one.what, contents.header.run_id, told)
        return sorted({one.name for one in missing})

    def totals(self) -> list[SpentTotal]:
        """What was spent on each set of records, by unit."""
        return totals_of(self._all())

    def of_all_units(self) -> list[SpentTotal]:
        """What was spent on each set of records that paid for more than one unit, all units together.

        It is about what is one unit of each kind, such as a customer who has a single record: of a customer with more,
        what was paid by records says nothing; and if one record leaves a customer who keeps others, the customer has
        changed, which for the guarantee about customers is two steps, out and in again. An ensemble by shards counts
        for whatever lies in one shard, as each record does; no line of a single unit but its own has it.
        """
        return totals_of_all_units(self._all())

    def _all(self) -> list[Spent]:
        """All entries, and ledgers beside the register that no line names."""
        found = self._beside()
        entries, salt = self._read()
        salt = salt or secrets.token_hex(32)  # without a register there is no key, and no other digest to compare with
        unnamed = [spent for one in self._unnamed(found, entries) for spent in one.entry(_key_of(one, salt))]
        return dearest([*map(_priced, _grown_by(found, entries)), *unnamed])

    def _beside(self) -> list[Beside]:
        """What lies beside the register. Read before it is: a run's line is there before its ledger begins."""
        return [*ledgers_beside([self.path.absolute().parent, self.path.resolve().parent, *self.beside_too])]

    def _unnamed(self, found: Sequence[Beside], entries: Sequence[Mapping[str, Any]]) -> list[Beside]:
        """Those that neither this register names nor another one that their folders name, or that lies as usual."""
        named = {str(entry["id"]) for entry in entries}
        if all(named.intersection(one.ids) for one in found):
            return []
        for path in self._others([*USUAL_PLACES, *registers_of(found)]):
            try:
                named |= {str(entry["id"]) for entry in Register(path)._read()[0]}
            except (DptuneError, OSError):
                continue  # whatever it counts counts here too
        return [one for one in found if not named.intersection(one.ids)]

    def _add(self, records: str, what: str, identity: str, content: Mapping[str, Any], *, again: bool = True) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        real = self.path.resolve()  # a link in a copy of the checkout: one lock for all who write the file
        with locked(real.with_name(f".{real.name}.lock"), wait=True):
            if not whole_lines(self.path):
                append_line(self.path, {"kind": "register", "salt": secrets.token_hex(32)})
            entries, salt = self._read()
            key = _keyed(records, salt)
            known = next((entry for entry in entries if (entry["records"], entry["id"]) == (key, identity)), None)
            grown = dict(content) if known is None else _grown(known["content"], content, what)
            if grown is None:
                return
            if known is None and not again:
                _refuse(self.earlier(records, [identity]))
            append_line(self.path, {"kind": what, "id": identity, "records": key, "content": grown})

    def _read(self) -> tuple[list[dict[str, Any]], str]:
        """The entries, the last line of each, and the key of the records' digests.

        Raises: DamagedRegisterError for lines that are not what was written there, with what ledgers beside it show.
        """
        try:
            own, *lines = read_lines(self.path) or [{}]
        except DamagedRegisterError as error:
            shown = dearest(replace(spent, named=True) for one in self._beside() for spent in one.entry(""))
            told = f"; the ledgers beside it show that records paid {said(shown)}, or more" if shown else ""
            raise DamagedRegisterError(error.problem, told) from None
        entries = {(line["records"], line["id"]): line for line in lines}
        return list(entries.values()), str(own.get("salt", ""))


def _may_be_there(path: Path) -> bool:
    """Whether a file is there, or nobody can tell: its folder may be another user's."""
    try:
        return path.is_file()
    except OSError:
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


def _key_of(one: Beside, salt: str) -> str:
    """The keyed digest of a ledger's records; empty where its folder does not say which paid."""
    return _keyed(one.booking.records, salt) if one.booking else ""


def _grown_by(found: Iterable[Beside], entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries; that of a cell whose ledger holds more than its last line says, with what the ledger holds.

    Other entries are plans, which no ledger exceeds.
    """
    cells = {one.ids[0]: one.file for one in found if one.what == "cell" and one.file.is_file()}
    grown = []
    for entry in entries:
        path, content = cells.get(entry["id"]), entry["content"]
        if path is not None and path.read_bytes().count(b"\n") - 1 > sum(_counts(content).values()):
            with suppress(LedgerError):
                contents = read_acknowledged(path)
                more = {**content, **_content(contents.header, contents.composition)}
                entry = entry | {"content": _grown(content, more, "cell") or content}
        grown.append(entry)
    return grown


def _keyed(records: str, salt: str) -> str:
    return blake2b(records.encode(), key=bytes.fromhex(salt), digest_size=16).hexdigest() if salt else ""
