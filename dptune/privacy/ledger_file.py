"""The file of a ledger: one JSON object a line, each with the SHA-256 of all lines up to its own, its chain.

The first line is the run's header, then comes one line per release, and a last line when the run has ended. Reading
finds and names a torn, reordered or edited line. The file alone cannot show that whole lines were cut off at its end;
for that, checkpoints keep the length and chain that they rely on, and a ledger without its last line counts as
unfinished. The file holds nothing private: a release describes the mechanism, never the records.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import holder_of, lock_now, not_a_file
from dptune.privacy.accountants import Epsilons
from dptune.privacy.release import NOISES, Composition, Release
from dptune.privacy.run_header import OtherFormatError, RunHeader

GENESIS = "0" * 64
_RUN_LINE = b'{"accounting":"'  # the start of every first line
_STEP = b'"step":'  # the last key of a release's line before its chain
_SEAL = len(',"chain":"' + GENESIS + '"}\n')
_MOST_KNOWN = 4096  # largest number of kinds of release whose lines are remembered


class LedgerError(DptuneError):
    """A ledger that cannot be trusted or continued; the message names the file, the line and the reason."""


@dataclass(frozen=True, repr=False)
class LedgerContents:
    """The contents of a ledger file, after every line was checked.

    Attributes:
        scores: SHA-256 of the auditor's file of coins and scores, as the run ended; empty without canaries.

    Example:
        >>> from collections import Counter
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from dptune.privacy.ledger import Ledger
        >>> from dptune.privacy.ledger_file import read_ledger
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.run_header import RunHeader
        >>> path, step = Path(mkdtemp()) / "ledger.jsonl", Release(sample_rate=1.0, noise_multiplier=5.0)
        >>> header = RunHeader("static", "gdp_clt", "certified", epsilon=2.0, delta=1e-5, unit="record", units=800)
        >>> with Ledger.open(path, header, planned=Counter({step: 3})) as ledger:
        ...     ledger.charge(step)
        >>> contents = read_ledger(path)
        >>> contents.releases, contents.complete, round(contents.epsilons.certified, 3)
        (1, False, 0.726)
    """

    header: RunHeader
    composition: Composition
    releases: int
    chain: str
    complete: bool
    last: Release | None = None
    scores: str = ""

    @cached_property
    def epsilons(self) -> Epsilons:
        """The three epsilons, recomputed from the file alone. A candidate of a search has no certified one."""
        prices = self.header.price(self.composition)
        if not self.header.search:
            return prices
        why = f"one candidate of search {self.header.search}, chosen among others: see its certificate"
        return replace(prices, certified=math.inf, leaks=(*prices.leaks, why))

    def __repr__(self) -> str:
        """Summary on one line: mechanism, data, unit, number of releases, and the chain, by which ledgers differ."""
        state = "complete" if self.complete else "not complete"
        about = f"{self.header.mechanism}, {self.header.data!r}, unit {self.header.unit!r}"
        return f"LedgerContents({about}, {self.releases} releases, {state}, chain {self.chain[:12]})"


def read_ledger(path: Path) -> LedgerContents:
    """Read and check a whole ledger.

    Raises: LedgerError naming the first line that is torn, edited, out of order or out of place.

    Example:
        >>> from collections import Counter
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from dptune.privacy.ledger import Ledger
        >>> from dptune.privacy.ledger_file import read_ledger
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.run_header import RunHeader
        >>> path, step = Path(mkdtemp()) / "ledger.jsonl", Release(sample_rate=1.0, noise_multiplier=5.0)
        >>> header = RunHeader("static", "gdp_clt", "certified", epsilon=2.0, delta=1e-5, unit="record", units=800)
        >>> with Ledger.open(path, header, planned=Counter({step: 3})) as ledger:
        ...     ledger.charge(step)
        >>> path.write_text(path.read_text().replace('"noise_multiplier":5.0', '"noise_multiplier":9.0')) > 0
        True
        >>> try:
        ...     read_ledger(path)
        ... except Exception as error:
        ...     print(str(error).split(": ")[1])
        was edited or reordered
    """
    header: RunHeader | None = None
    composition: Composition = Counter()
    releases, chain, complete = 0, GENESIS, False
    last: Release | None = None
    scores = ""
    for number, content, chain in _lines(path):  # noqa: B007 (chain is read after the loop)
        if complete:
            raise _bad_line(path, number, "comes after the end of the run")
        if isinstance(content, RunHeader) != (number == 1):
            raise _bad_line(path, number, "is not where a run line belongs")
        if isinstance(content, RunHeader):
            header = content
        elif isinstance(content, _Charge):
            if content.step != releases:
                raise _bad_line(path, number, f"is not step {releases}: lines are missing or reordered")
            if problem := row_problem(last, content.release, content.step, header.units if header else 0):
                raise _bad_line(path, number, problem)
            last = content.release
            composition[last] += 1
            releases += 1
        else:
            if content.releases != releases:
                raise _bad_line(path, number, f"states {content.releases} releases, but the ledger holds {releases}")
            complete, scores = True, content.scores
    if header is None:
        raise LedgerError(
            f"{path}, line 1: the ledger is empty. Fix: restore it; if no run ever started here, remove the empty file."
        )
    return LedgerContents(header, composition, releases, chain, complete, last, scores)


def first_header(path: Path) -> RunHeader | None:
    """The header of a ledger; None if its first line is not whole. Nothing after it is checked."""
    try:
        return next((content for _, content, _ in _lines(path) if isinstance(content, RunHeader)), None)
    except (LedgerError, OSError):
        return None


def first_release(path: Path) -> Release | None:
    """The first release of a ledger; None if no whole line holds one. Nothing after it is checked."""
    try:
        return next((content.release for _, content, _ in _lines(path) if isinstance(content, _Charge)), None)
    except (LedgerError, OSError):
        return None


def is_complete(path: Path) -> bool:
    """Whether a ledger's run has ended: whether the last line is there, which is written after everything else."""
    try:
        return path.exists() and read_ledger(path).complete
    except LedgerError:
        return False  # the run resumes: that cuts off a torn last line, and refuses worse damage with its reason


def chain_after(path: Path, releases: int) -> str | None:
    """The checksum of a ledger after its first ``releases`` releases; None if it has fewer."""
    for number, content, chain in _lines(path):
        if number == releases + 1 and not isinstance(content, _End):
            return chain
    return None


def discard_unborn(path: Path) -> None:
    """Remove a ledger whose first line was cut off in writing: nothing can have been charged to it.

    Such a file is empty or holds the start of a first line. Any other file without a whole line was damaged later, and
    is kept.
    """
    with path.open("rb") as file:
        if not lock_now(file.fileno()):
            holder = holder_of(file.fileno())
            raise LedgerError(f"{path}: another process is starting it{holder}. Fix: wait for it.")
        content = file.read()
        begun = _RUN_LINE.startswith(content[: len(_RUN_LINE)]) and b'"kind":"release"' not in content
        if begun and b"\n" not in content:
            path.unlink()


def seal(body: str, chain: str) -> tuple[bytes, str]:
    """Make the line of a record that follows ``chain``; returns the line and the chain after it."""
    after = hashlib.sha256((chain + body).encode()).hexdigest()
    return f'{body[:-1]},"chain":"{after}"}}\n'.encode(), after


def encode(record: Mapping[str, Any]) -> str:
    """Write a record as JSON in its one canonical spelling."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


@lru_cache(maxsize=_MOST_KNOWN)
def release_body(release: Release) -> str:
    """The line of a release up to its step, which is its last key."""
    body = encode({"kind": "release", "step": 0, **release.to_dict()})
    return body.removesuffix("0}")


class _Charge(NamedTuple):
    """A release, and the step that its line states."""

    step: int
    release: Release


class _End(NamedTuple):
    """The last line of a run that has ended, with the digest of its auditor's scores."""

    releases: int
    scores: str


_Content = RunHeader | _Charge | _End


def _lines(path: Path) -> Iterator[tuple[int, _Content, str]]:
    """Yield number, content and chain of every line, checked against the chain and the one canonical spelling."""
    chain = GENESIS
    known: dict[bytes, Release] = {}
    if other := not_a_file(path):
        raise LedgerError(f"{path}: is {other}, not a file. Fix: check the path.")
    try:
        file = path.open("rb")
    except OSError as error:
        raise LedgerError(f"{path}: cannot be read ({error.strerror}). Fix: check the path.") from None
    with file:
        for number, raw in enumerate(file, start=1):
            head = raw[: raw.rfind(_STEP) + len(_STEP)]
            release = known.get(head)
            if release is not None:
                after = _chain_of_known(raw, head, number - 2, chain)
                if after is not None:
                    chain = after
                    yield number, _Charge(number - 2, release), chain
                    continue
            record, chain = _check_line(path, number, raw, chain)
            content = _content(path, number, record)
            yield number, content, chain
            if isinstance(content, _Charge) and raw[len(head) : -_SEAL] == b"%d" % content.step:
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[head] = content.release


def _chain_of_known(raw: bytes, head: bytes, step: int, chain: str) -> str | None:
    """The chain after a line that repeats a checked line, ``head``, with another step; None if it is no such line.

    This skips parsing the line: if a line is canonical with one step, it is canonical with any other number there.
    """
    body = head + b"%d" % step
    after = hashlib.sha256(chain.encode() + body + b"}").hexdigest()
    return after if raw == body + f',"chain":"{after}"}}\n'.encode() else None


def _check_line(path: Path, number: int, raw: bytes, chain: str) -> tuple[dict[str, Any], str]:
    """Check a line; returns its record, without the chain, and the chain after it. Raises LedgerError."""
    if not raw.endswith(b"\n"):
        raise _bad_line(path, number, "is torn: the write was cut off")
    try:
        record = json.loads(raw)
        stated = record.pop("chain")
        body = encode(record)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise _bad_line(path, number, "is torn, or is not a line of a ledger") from None
    line, chain = seal(body, chain)
    if stated != chain or raw != line:
        raise _bad_line(path, number, "was edited or reordered: its checksum does not follow from the lines above")
    return record, chain


def _content(path: Path, number: int, record: dict[str, Any]) -> _Content:
    kind = record.pop("kind", None)
    try:
        if kind == "run":
            return RunHeader.from_dict(record)
        if kind == "release":
            if isinstance(family := record.get("noise"), str) and family not in NOISES:
                problem = f"{path}, line {number}: names a noise {family!r} that this version of dptune does not know"
                raise LedgerError(f"{problem}. Fix: verify it with the version that wrote it.")
            return _Charge(_whole(record.pop("step", None)), Release.from_dict(record))
        if kind == "end" and set(record) | {"scores"} == {"releases", "scores"}:
            return _End(_whole(record["releases"]), str(record.get("scores", "")))
    except OtherFormatError as error:  # not damaged: "restore it" would mislead
        raise LedgerError(f"{path}, line {number}: {error}") from None
    except (ConfigError, ArithmeticError, AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise _bad_line(path, number, f"does not describe a {kind}: {error}") from None
    raise _bad_line(path, number, f"is not a valid {kind!r} line")


def _whole(value: Any) -> int:
    if type(value) is not int:  # bool is a subclass of int
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _bad_line(path: Path, number: int, reason: str) -> LedgerError:
    reason = reason.partition(". Fix:")[0]  # of a value that no user wrote
    return LedgerError(f"{path}, line {number}: {reason}. Fix: restore the file; no epsilon can be computed from it.")


# Rules for the rows of a ledger whose price rests on more than their count.
#
# Correlated noise: row r is about group r mod b, and all rows are made alike. A unit's visits are then b rows apart,
# whatever process made which row. A sampler other than Poisson: all rows have the same one, at the same rate. Row r is
# then batch r mod T of epoch r div T.


def row_problem(last: Release | None, release: Release, row: int, units: int) -> str | None:
    """Why ``release`` may not be row ``row`` of a ledger whose row before is ``last``, as a clause; None if it may.

    Rows of independent noise and Poisson samples may follow one another in any way. With a strategy, every row has the
    same one, and the same rate, noise and sensitivity; only its group differs, which the number of the row decides.
    Samplers may differ between rows about different parts of the units, for these are priced apart.

    Args:
        units: number of units that the ledger's first line states; the chance that a batch is cut hangs on it.
    """
    if release.sampler.units not in (0, units):
        return f"is priced for {release.sampler.units} units, and the run has {units}"
    if problem := _sampler_problem(last, release):
        return problem
    if not release.coefficients and (last is None or not last.coefficients):
        return None
    if last is not None:
        other = [
            item.name
            for item in fields(Release)
            if item.name != "part" and getattr(last, item.name) != getattr(release, item.name)
        ]
        if other:
            return f"differs in {', '.join(other)} from the row before, and rows of correlated noise are all alike"
    elif row:
        return "is not the first row, but the ledger holds no row before it"
    bands = len(release.coefficients)
    if release.part != row % bands:
        return f"is about group {release.part}, where row {row} of {bands} bands is about group {row % bands}"
    return None


def _sampler_problem(last: Release | None, release: Release) -> str | None:
    if last is None or last.part != release.part or (last.sampler.like_poisson and release.sampler.like_poisson):
        return None
    if last.sampler != release.sampler:
        return f"is drawn by {_said(release)}, and the row before by {_said(last)}: one run has one sampler"
    if last.sample_rate != release.sample_rate:
        return f"has sample rate {release.sample_rate!r}, and the row before {last.sample_rate!r}"
    return None


def _said(release: Release) -> str:
    numbers = {name: value for name, value in release.sampler.to_dict().items() if name != "name"}
    return " ".join([release.sampler.name, *(f"({name} {value})" for name, value in numbers.items())])
