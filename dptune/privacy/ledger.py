"""The ledger: an append-only file that is charged before any noisy value exists.

One JSON object a line. The first line is the run (what is needed to price it), then one line per release,
then, when the run is finished, a last line. Every line carries the SHA-256 of the chain up to and including
itself, so that a torn, reordered or edited line is found and named. Lines cut off whole at the end cannot be
seen in the file alone: checkpoints keep the length and chain that they rely on, and an unfinished ledger
says so. The file holds nothing private: a release describes the mechanism, never the records.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from dptune.errors import ConfigError, DptuneError
from dptune.files import fsync_directory
from dptune.privacy.accountants import (
    PUBLISHED_ACCOUNTANTS,
    Epsilons,
    epsilons,
    leaks_of,
    published_epsilon,
)
from dptune.privacy.filters import RenyiFilter, Spend
from dptune.privacy.parts import disjoint
from dptune.privacy.release import Composition, Release

ACCOUNTINGS = ("certified", "noise_only", "published")
_FORMAT = 5
_GENESIS = "0" * 64
_RUN_LINE = b'{"accounting":"'  # how the first line begins
_STEP = b'"step":'  # the last key of a release before its chain
_SEAL = len(',"chain":"' + _GENESIS + '"}\n')
_MOST_KNOWN = 4096  # kinds of release whose lines are remembered


class LedgerError(DptuneError):
    """A ledger that cannot be trusted or continued; the message names the file, the line and the reason."""


class OtherFormatError(ConfigError):
    """A ledger of another version of dptune: whole, but not for this one to price."""

    def __init__(self, written: Any) -> None:
        problem = f"{written!r} is not format {_FORMAT}, which this dptune reads"
        super().__init__("format", problem, fix="verify it with the dptune that wrote it, and keep the file as it is")


class BudgetError(DptuneError):
    """The next release would pass the budget; it was neither charged nor made."""


@dataclass(frozen=True)
class RunHeader:
    """The first line of a ledger: everything besides the releases that an epsilon depends on. Public.

    Attributes:
        mechanism: registered name.
        published_accountant: key of ``PUBLISHED_ACCOUNTANTS``.
        accounting: which epsilon the budget limits, one of ``ACCOUNTINGS``.
        epsilon: the budget, or None when the run has none (the non-private mechanism).
        delta: of every epsilon of this run.
        unit: "encounter" or "patient": what is added or removed.
        units: how many units the training data holds (public by assumption).
        data: label of the data source, "synthetic" included.
        telemetry: "research" when curves computed from private records are logged beside the adapter. "private" when
            only what was released and what is public is told; the times at which it was released are not covered:
            Prefect's database, logs and files keep them.
        leaks: reasons from outside the releases that void the guarantee (a fixed noise seed).
        renyi_filter: the filter fixed before the run, or None.
        inherited: releases of other runs that this one was made from; its epsilon includes them.
        schedule: digest of whatever else decides which units a release is about; empty where nothing does.
        plugins: name, version and digest of the code outside dptune that bounds, noises or steers. The epsilons hold if
            it does what it says.
        run_id: ties checkpoints to this ledger.
    """

    mechanism: str
    published_accountant: str
    accounting: str
    epsilon: float | None
    delta: float
    unit: str
    units: int
    data: str = "unspecified"
    telemetry: str = "research"
    leaks: tuple[str, ...] = ()
    renyi_filter: RenyiFilter | None = None
    inherited: tuple[tuple[Release, int], ...] = ()
    schedule: str = ""
    plugins: tuple[str, ...] = ()
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if not (isinstance(self.delta, float) and 0 < self.delta < 1):
            raise ConfigError("delta", f"{self.delta!r} is not in (0, 1)", fix="use a number")
        if self.epsilon is not None and not (isinstance(self.epsilon, int | float) and math.isfinite(self.epsilon)):
            raise ConfigError("epsilon", f"{self.epsilon!r} is not a number", fix="use a number")
        if self.accounting not in ACCOUNTINGS:
            raise ConfigError("accounting", f"unknown {self.accounting!r}", fix=f"use {' or '.join(ACCOUNTINGS)}")
        if self.published_accountant not in PUBLISHED_ACCOUNTANTS:
            raise ConfigError(
                "published_accountant", f"unknown {self.published_accountant!r}", fix="use a known accountant"
            )
        if self.accounting == "certified" and self.leaks and self.epsilon is not None:
            raise ConfigError(
                "accounting",
                f"certified is refused: {'; '.join(self.leaks)}",
                fix="remove the leak or use published",
            )

    def price(self, composition: Composition) -> Epsilons:
        """The three epsilons of a composition in this run."""
        return epsilons(
            composition,
            self.delta,
            published_accountant=self.published_accountant,
            renyi_filter=self.renyi_filter,
            run_leaks=self.leaks,
            inherited=composition_of(self.inherited),
        )

    def leaks_of(self, composition: Composition) -> tuple[str, ...]:
        """Why a run of these releases has no certified epsilon; priced at nothing."""
        return leaks_of(composition + composition_of(self.inherited), self.renyi_filter, self.leaks)

    def within_budget(self, composition: Composition) -> bool:
        """Whether the composition keeps the epsilon that ``accounting`` names within the budget."""
        if self.epsilon is None:
            return True
        if self.accounting == "published":  # the others would price a moving noise at every charge
            return published_epsilon(self.published_accountant, composition, self.delta) <= self.epsilon
        return float(getattr(self.price(composition), self.accounting)) <= self.epsilon

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = asdict(self)
        data["leaks"] = list(self.leaks)
        data["inherited"] = [[release.to_dict(), count] for release, count in self.inherited]
        data["plugins"] = list(self.plugins)
        if not self.plugins:
            del data["plugins"]  # so that ledgers without plug-ins stay as they were
        return {"format": _FORMAT, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunHeader:
        """Inverse of ``to_dict``; raises ConfigError on missing or unknown keys."""
        values = {"plugins": [], **data}
        if (written := values.pop("format", None)) != _FORMAT:
            raise OtherFormatError(written)
        known = {item.name for item in fields(cls)}
        if set(values) != known:
            raise ConfigError("run", f"keys {sorted(set(values) ^ known)} missing or unknown", fix="use a whole ledger")
        if not isinstance(values["leaks"], list):
            raise ConfigError("leaks", "is not a list", fix="write a list of reasons")
        values["leaks"] = tuple(values["leaks"])
        plugins = values["plugins"]
        if not isinstance(plugins, list) or not all(isinstance(plugin, str) for plugin in plugins):
            raise ConfigError("plugins", f"{plugins!r} is not a list of names", fix="use a whole ledger")
        values["plugins"] = tuple(plugins)
        values["inherited"] = tuple((Release.from_dict(item), _count(count)) for item, count in values["inherited"])
        if values["renyi_filter"] is not None:
            values["renyi_filter"] = RenyiFilter.from_dict(values["renyi_filter"])
        return cls(**values)


def composition_of(inherited: tuple[tuple[Release, int], ...]) -> Composition:
    """The releases of a header's ``inherited``; entries that name the same release add up."""
    total: Composition = Counter()
    for release, count in inherited:
        total[release] += count
    return total


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("inherited", f"{value!r} is no count", fix="write a whole number")
    return value


@dataclass(frozen=True)
class LedgerContents:
    """What a ledger file says, after every line was checked."""

    header: RunHeader
    composition: Composition
    releases: int
    chain: str
    complete: bool
    last: Release | None = None

    @property
    def epsilons(self) -> Epsilons:
        """Recomputed from the file alone."""
        return self.header.price(self.composition)


class Ledger:
    """A ledger open for charging. One process at a time: the file is locked.

    Use ``create`` or ``resume``, then ``charge`` before every release and ``finish`` at the end.
    """

    def __init__(
        self, path: Path, descriptor: int, contents: LedgerContents, cleared: Composition, planned: int
    ) -> None:
        self.path = path
        self.header = contents.header
        self.releases = contents.releases
        self.composition: Composition = Counter(contents.composition)
        self.chain = contents.chain
        self._descriptor = descriptor
        self._length, self._process = os.fstat(descriptor).st_size, os.getpid()
        # Any prefix of a composition that is within the budget is within it too, so the planned run is
        # priced once and not at every step.
        self._cleared = cleared
        self._planned = planned
        self._gate = _FilterGate.of(self.header, self.composition)

    @property
    def spent(self) -> float | None:
        """What the releases so far cost the header's filter (never too little); None without one. Costs nothing."""
        return None if self._gate is None else self._gate.mine.value

    @classmethod
    def create(cls, path: Path, header: RunHeader, planned: Composition) -> Self:
        """Start a ledger for a run that plans these releases.

        Raises:
            BudgetError: the plan itself passes the budget.
            LedgerError: the file exists or cannot be written.
        """
        if not header.within_budget(planned):
            raise BudgetError(
                f"the planned {planned.total()} releases cost more than the budget epsilon {header.epsilon} "
                f"under {header.accounting} accounting. Fix: calibrate the noise for this plan."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o600)
        except FileExistsError:
            raise LedgerError(f"{path}: exists already. Fix: resume it; a run elsewhere spends again.") from None
        except OSError as error:
            raise LedgerError(f"{path}: cannot be created ({error.strerror}). Fix: make its folder writable.") from None
        _lock(descriptor, path)
        ledger = cls(
            path, descriptor, LedgerContents(header, Counter(), 0, _GENESIS, False), Counter(planned), planned.total()
        )
        try:
            ledger._append({"kind": "run", **header.to_dict()})
            fsync_directory(path.parent)
        except BaseException as error:
            ledger.close()
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise LedgerError(f"{path}: cannot be written ({error.strerror}). Fix: check the disk.") from error
            raise
        return ledger

    @classmethod
    def resume(cls, path: Path, planned: Composition) -> Self:
        """Continue an unfinished ledger.

        A last line without its newline was never acknowledged, so no noisy value came of it: it is cut off.

        Raises:
            LedgerError: missing, damaged, finished, or in use by another process.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise LedgerError(f"{path}: cannot be opened ({error.strerror}). Fix: check the path.") from None
        _lock(descriptor, path)
        try:
            _cut_unacknowledged_line(descriptor)
            contents = read_ledger(path)
            if contents.complete:
                raise LedgerError(
                    f"{path}: the run is finished. Fix: use what it made. To run it again, and spend again, keep this "
                    "ledger: `dptune set-aside` with its folder."
                )
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise LedgerError(f"{path}: cannot be written ({error.strerror}). Fix: check the disk.") from error
            raise
        # What the file holds counts against the budget together with what is still planned.
        union = contents.composition | planned
        cleared = union if contents.header.within_budget(union) else contents.composition
        return cls(path, descriptor, contents, Counter(cleared), planned.total())

    @staticmethod
    def discard_unborn(path: Path) -> None:
        """Remove a ledger whose first line was never acknowledged: nothing can have been charged to it.

        Only what a write that was cut off leaves is removed: nothing, or the start of a first line. Any other file
        without a whole line was damaged later, and stays.
        """
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LedgerError(f"{path}: another process is starting it. Fix: wait for it.") from None
            content = file.read()
            begun = _RUN_LINE.startswith(content[: len(_RUN_LINE)]) and b'"kind":"release"' not in content
            if begun and b"\n" not in content:
                path.unlink()

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget. Decided without reading data."""
        if self.header.epsilon is None:
            return True
        if self._gate is not None and self._gate.decides(release):
            # What was cleared did not know of the releases that come in here.
            self._cleared = Counter()
            return self._gate.admits(release)
        if self.composition[release] < self._cleared[release]:
            return True
        # Clear as many more of the same as may come, so that a price is not computed at every step.
        ahead = max(1, self._planned - self.releases)
        while ahead:
            wanted = self.composition + Counter({release: ahead})
            if self.header.within_budget(wanted):
                self._cleared = wanted
                return True
            ahead //= 2
        return False

    def charge(self, release: Release) -> None:
        """Write the release to disk; when this returns, and only then, the noisy value may be drawn.

        Raises:
            BudgetError: the release would pass the budget. Nothing was written.
            LedgerError: the disk refused the line. Nothing counts as released.
        """
        if not self.admits(release):
            raise BudgetError(
                f"release {self.releases + 1} would pass the budget epsilon {self.header.epsilon} "
                f"({self.header.accounting} accounting)."
            )
        self._write(f"{_release_body(release)}{self.releases}}}")
        self.composition[release] += 1
        self.releases += 1
        if self._gate is not None:
            self._gate.count(release)

    def finish(self) -> None:
        """Write the last line and close: nothing can be charged afterwards."""
        self._append({"kind": "end", "releases": self.releases})
        self.close()

    def close(self) -> None:
        """Release the file and its lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._write(_encode(record))

    def _write(self, body: str) -> None:
        if self._descriptor < 0:
            raise LedgerError(f"{self.path}: is closed. Fix: resume it.")
        chain = _extend(self.chain, body)
        line = f'{body[:-1]},"chain":"{chain}"}}\n'.encode()
        length = os.fstat(self._descriptor).st_size
        if os.getpid() != self._process or length != self._length:
            # A lock is shared with forked processes, and holds off only those who ask for it.
            raise LedgerError(f"{self.path}: was forked, or changed by another process. Fix: open it again.")
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError("short write: is the disk full?")
            os.fsync(self._descriptor)
        except OSError as error:
            try:
                os.ftruncate(self._descriptor, length)
            except OSError:
                self.close()
            raise LedgerError(
                f"{self.path}: cannot be written ({error.strerror or error}); nothing was released. Fix: free space."
            ) from error
        self.chain = chain
        self._length = length + len(line)


class _FilterGate:
    """Decides on adaptive releases by the filter's running sum, as ``RunHeader.within_budget`` would by all of them."""

    def __init__(self, header: RunHeader, renyi_filter: RenyiFilter, composition: Composition) -> None:
        self._header, self._filter = header, renyi_filter
        self.mine = Spend(renyi_filter, composition)
        theirs = [Spend(renyi_filter, part) for part in disjoint(composition_of(header.inherited))]
        self._theirs = max(theirs, key=lambda spend: spend.value)
        self._reaches = header.epsilon is not None and renyi_filter.limit(header.delta) <= header.epsilon
        inherited = composition_of(header.inherited)
        self._leaky = bool(header.leaks_of(composition))
        self._parts = any(release.part is not None for release in composition + inherited)

    @classmethod
    def of(cls, header: RunHeader, composition: Composition) -> Self | None:
        """None without a filter."""
        return None if header.renyi_filter is None else cls(header, header.renyi_filter, composition)

    def decides(self, release: Release) -> bool:
        """Whether the filter alone prices the run with this release; not of parts, which do not add up."""
        whole = not self._parts and release.part is None
        return release.adaptive and whole and self._header.accounting != "published"

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget."""
        if self._header.accounting == "certified" and (self._leaky or release.leaks):
            return False
        total = self.mine.with_another(release) + self._theirs
        return self._reaches and self._filter.affords(total.value)

    def count(self, release: Release) -> None:
        """It was charged."""
        self.mine.add(release)
        self._leaky |= bool(release.leaks)
        self._parts |= release.part is not None


def read_ledger(path: Path) -> LedgerContents:
    """Read and check a whole ledger.

    Raises: LedgerError naming the first line that is torn, edited, out of order or out of place.
    """
    header: RunHeader | None = None
    composition: Composition = Counter()
    releases, chain, complete = 0, _GENESIS, False
    last: Release | None = None
    for number, content, chain in _lines(path):  # noqa: B007 (chain is read after the loop)
        if complete:
            raise _bad(path, number, "comes after the end of the run")
        if isinstance(content, RunHeader) != (number == 1):
            raise _bad(path, number, "is not where a run line belongs")
        if isinstance(content, RunHeader):
            header = content
        elif isinstance(content, _Charge):
            if content.step != releases:
                raise _bad(path, number, f"is not step {releases}: lines are missing or reordered")
            last = content.release
            composition[last] += 1
            releases += 1
        else:
            if content.releases != releases:
                raise _bad(path, number, f"says {content.releases} releases where there are {releases}")
            complete = True
    if header is None:
        raise LedgerError(
            f"{path}, line 1: the ledger is empty. Fix: restore it; if no run began here, it holds nothing."
        )
    return LedgerContents(header, composition, releases, chain, complete, last)


def chain_after(path: Path, releases: int) -> str | None:
    """The checksum of a ledger after its first ``releases`` releases; None if it has fewer."""
    for number, content, chain in _lines(path):
        if number == releases + 1 and not isinstance(content, _End):
            return chain
    return None


class _Charge(NamedTuple):
    """A release and where it says it stands."""

    step: int
    release: Release


class _End(NamedTuple):
    """The last line."""

    releases: int


_Content = RunHeader | _Charge | _End


def _lines(path: Path) -> Iterator[tuple[int, _Content, str]]:
    """Number, content and chain of every line, each checked against the chain and its one canonical spelling."""
    chain = _GENESIS
    known: dict[bytes, Release] = {}
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
            record, chain = _checked(path, number, raw, chain)
            content = _content(path, number, record)
            yield number, content, chain
            if isinstance(content, _Charge) and raw[len(head) : -_SEAL] == b"%d" % content.step:
                if len(known) >= _MOST_KNOWN:
                    known.clear()
                known[head] = content.release


def _chain_of_known(raw: bytes, head: bytes, step: int, chain: str) -> str | None:
    """The chain after a line that is spelt like one that was checked but for its step, its last key before the chain;
    None if it is not.

    JSON is written key by key: where one step makes the canonical line, the number of another makes the other's.
    """
    body = head + b"%d" % step
    after = hashlib.sha256(chain.encode() + body + b"}").hexdigest()
    return after if raw == body + f',"chain":"{after}"}}\n'.encode() else None


def _checked(path: Path, number: int, raw: bytes, chain: str) -> tuple[dict[str, Any], str]:
    """The record of a line, without its chain, and the chain after it."""
    if not raw.endswith(b"\n"):
        raise _bad(path, number, "is torn: the write was cut off")
    try:
        record = json.loads(raw)
        stated = record.pop("chain")
        body = _encode(record)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise _bad(path, number, "is torn or no ledger line") from None
    chain = _extend(chain, body)
    if stated != chain or raw != f'{body[:-1]},"chain":"{chain}"}}\n'.encode():
        raise _bad(path, number, "was edited or reordered: its checksum does not follow from the lines above")
    return record, chain


def _content(path: Path, number: int, record: dict[str, Any]) -> _Content:
    kind = record.pop("kind", None)
    try:
        if kind == "run":
            return RunHeader.from_dict(record)
        if kind == "release":
            return _Charge(_whole(record.pop("step", None)), Release.from_dict(record))
        if kind == "end" and set(record) == {"releases"}:
            return _End(_whole(record["releases"]))
    except OtherFormatError as error:  # one fix: there is nothing to restore
        raise LedgerError(f"{path}, line {number}: {error}") from None
    except (ConfigError, ArithmeticError, AttributeError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise _bad(path, number, f"does not describe a {kind}: {error}") from None
    raise _bad(path, number, f"is no valid {kind!r} line")


def _whole(value: Any) -> int:
    if type(value) is not int:  # nor a bool
        raise ValueError(f"{value!r} is no whole number")
    return value


@lru_cache(maxsize=_MOST_KNOWN)
def _release_body(release: Release) -> str:
    """The line of a release up to its step, whose key is the last of all."""
    body = _encode({"kind": "release", "step": 0, **release.to_dict()})
    return body.removesuffix("0}")


def _encode(record: Mapping[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _extend(chain: str, body: str) -> str:
    return hashlib.sha256((chain + body).encode()).hexdigest()


def _bad(path: Path, number: int, reason: str) -> LedgerError:
    return LedgerError(f"{path}, line {number}: {reason}. Fix: restore the file; no epsilon can be computed from it.")


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process is charging it. Fix: wait for that process or stop it.") from None
    # Another process may have removed the name between our opening and locking the file behind it.
    if not path.exists() or os.stat(path).st_ino != os.fstat(descriptor).st_ino:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process replaced it just now. Fix: try again.")


def _cut_unacknowledged_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    tail_length = min(size, 1 << 16)
    tail = os.pread(descriptor, tail_length, size - tail_length)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, size - tail_length + tail.rfind(b"\n") + 1)
    # Also a whole line may not be on the disk yet: a checkpoint that relied on it would outlive it in a power cut.
    os.fsync(descriptor)
