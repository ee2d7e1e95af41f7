"""The ledger: an append-only file that is charged before any noisy value exists. See ``ledger_file`` for its format."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

from dptune.core.files import fsync_directory, holder_of, lock_now
from dptune.privacy.budget_gate import BudgetError, BudgetGate
from dptune.privacy.ledger_file import (
    GENESIS,
    LedgerContents,
    LedgerError,
    discard_unborn,
    encode,
    read_ledger,
    release_body,
    row_problem,
    seal,
)
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_folder import RunFolder, fresh_start, witnessed_releases
from dptune.privacy.run_header import FORMAT, RunHeader
from dptune.privacy.samplers.sampler import TRAINED

#: Makes the context in which a new ledger gets its first line, as ``booking.booked``.
Booked = Callable[[], AbstractContextManager[object]]


class Ledger:
    """A ledger that is open for charging. The file is locked, so that only one process charges it.

    Use ``open``, then ``charge`` before every release and ``finish`` at the end.

    Example:
        >>> from collections import Counter
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from dptune.privacy.ledger import Ledger
        >>> from dptune.privacy.ledger_file import read_ledger
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.run_header import RunHeader
        >>> path, step = Path(mkdtemp()) / "ledger.jsonl", Release(sample_rate=0.01, noise_multiplier=1.0)
        >>> header = RunHeader("static", "gdp_clt", "certified", epsilon=2.0, delta=1e-5, unit="record", units=800)
        >>> ledger = Ledger.open(path, header, planned=Counter({step: 100}))
        >>> for _ in range(100):
        ...     ledger.charge(step)  # on disk; only now may the noisy gradient be drawn
        >>> ledger.admits(Release(sample_rate=1.0, noise_multiplier=1.0))
        False
        >>> ledger.finish()
        >>> round(read_ledger(path).epsilons.certified, 2)
        0.72
    """

    def __init__(self, path: Path, descriptor: int, contents: LedgerContents, gate: BudgetGate) -> None:
        self.path = path
        self.header = contents.header
        self.releases = contents.releases
        self.chain = contents.chain
        self._last = contents.last
        self._gate = gate
        self._descriptor = descriptor
        self._length, self._process = os.fstat(descriptor).st_size, os.getpid()

    @property
    def composition(self) -> Composition:
        """The count of each distinct release that was charged."""
        return self._gate.composition

    @property
    def contents(self) -> LedgerContents:
        """What the file holds so far, as ``read_ledger`` gives it of a file that no process writes."""
        return LedgerContents(self.header, self.composition, self.releases, self.chain, complete=False)

    @property
    def spent(self) -> float | None:
        """The cost of the releases so far to the header's filter, rounded up; None without a filter. Fast to read."""
        return self._gate.spent

    @classmethod
    def open(cls, path: Path, header: RunHeader, planned: Composition, booked: Booked = nullcontext) -> Self:
        """Start the ledger of a run, or continue one that an earlier process left unfinished.

        A ledger whose first line was cut off in writing is started again: nothing was charged to it.

        Args:
            booked: see ``create``; not entered for a ledger that is continued.

        Raises:
            BudgetError: the plan of a new run passes the budget.
            LedgerError: the ledger has another header, is finished, damaged or in use; or it is missing, though files
                beside it show that the run released something.
        """
        left = [file for file in RunFolder(path.parent).released if file.exists()]
        if path.exists() and not left:
            discard_unborn(path)
        if not path.exists():
            if left:
                lost = f"{left[0]}: has no ledger beside it"
                raise LedgerError(f"{lost}. Fix: restore the ledger; or {fresh_start(path.parent)}.")
            return cls.create(path, header, planned, booked)
        ledger = cls.resume(path, planned)
        try:
            check_same_run(path, header, ledger.header)
            if ledger.releases < (known := witnessed_releases(path.parent, states=False)):
                # Checkpoints are left out here: whoever reads one compares its chain with the ledger's.
                problem = (
                    f"{path}: holds {ledger.releases} releases, but files beside it rely on {known}: the ledger was cut"
                )
                raise LedgerError(f"{problem}. Fix: restore the whole ledger; its charges cannot be dropped.")
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def create(cls, path: Path, header: RunHeader, planned: Composition, booked: Booked = nullcontext) -> Self:
        """Start a ledger for a run that plans these releases.

        Args:
            booked: makes the context in which the first line is completed, when nothing can refuse it any more.

        Raises:
            BudgetError: the plan itself passes the budget.
            LedgerError: the file exists or cannot be written.
            Exception: what ``booked`` raises; before it yields, the ledger is not begun, and its file goes.
        """
        gate = BudgetGate(header, Counter(), planned)
        if not gate.clears_plan:
            raise BudgetError(
                f"the planned {planned.total()} releases cost more than the budget epsilon {header.epsilon} "
                f"under {header.accounting} accounting. Fix: calibrate the noise for this plan."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND, 0o600)
        except FileExistsError:
            raise LedgerError(
                f"{path}: already exists. Fix: resume this run; a run in another folder spends again."
            ) from None
        except OSError as error:
            raise LedgerError(f"{path}: cannot be created ({error.strerror}). Fix: make its folder writable.") from None
        _lock(descriptor, path)
        ledger = cls(path, descriptor, LedgerContents(header, Counter(), 0, GENESIS, False), gate)
        try:
            # All but the line's end is on the disk first: a full one must refuse the run before anything is booked.
            line, chain = seal(encode({"kind": "run", **header.to_dict()}), GENESIS)
            ledger._put(line[:-1])
            fsync_directory(path.parent)
            with booked():
                ledger._put(line[-1:])
                ledger.chain = chain
        except BaseException as error:
            ledger.close()
            if ledger.chain == GENESIS:  # else it has begun, and is counted: it goes on
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                problem = f"{error.filename or path}: cannot be written ({error.strerror})"
                raise LedgerError(f"{problem}. Fix: check the disk.") from error
            raise
        return ledger

    @classmethod
    def resume(cls, path: Path, planned: Composition) -> Self:
        """Continue an unfinished ledger.

        A last line without its newline was never acknowledged, so no noisy value came of it: it is cut off.

        Raises:
            LedgerError: the ledger is missing, damaged, finished, or in use by another process.
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
                    f"{path}: the run is finished. Fix: use its results. To run it again, and spend again, keep this "
                    "ledger: `dptune set-aside` with its folder."
                )
            if contents.header.format != FORMAT:
                raise LedgerError(f"{path}: {_older(contents.header.format)} Fix: {fresh_start(path.parent)}.")
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise LedgerError(f"{path}: cannot be written ({error.strerror}). Fix: check the disk.") from error
            raise
        return cls(path, descriptor, contents, BudgetGate(contents.header, contents.composition, planned))

    def admits(self, release: Release) -> bool:
        """Whether one more such release stays within the budget. Decided without reading data."""
        return self._gate.admits(release)

    def charge(self, release: Release) -> None:
        """Write the release to disk; when this returns, and only then, the noisy value may be drawn.

        Raises:
            BudgetError: the release would pass the budget. Nothing was written.
            LedgerError: the disk refused the line; or the release is not the row that correlated noise has here, or
                its sampler not that of the rows before (see ``row_problem``). Nothing counts as released.
        """
        if not release.sampler.like_poisson and release.sampler.name not in TRAINED:
            unknown = f"{release.sampler.name} is a sampler that no training draws its batches by"
            fix = f"use {' or '.join(TRAINED)}; `dptune account` prices other samplers"
            raise LedgerError(f"{self.path}: {unknown}. Fix: {fix}.")
        if problem := row_problem(self._last, release, self.releases, self.header.units):
            again = "resume with the noise and the sampler that the run was started with"
            fix = f"{again}; or {fresh_start(self.path.parent)}"
            raise LedgerError(f"{self.path}: the next release {problem}. Fix: {fix}.")
        if not self.admits(release):
            raise BudgetError(
                f"release {self.releases + 1} would pass the budget epsilon {self.header.epsilon} "
                f"({self.header.accounting} accounting)."
            )
        self._write(f"{release_body(release)}{self.releases}}}")
        self.releases += 1
        self._last = release
        self._gate.count(release)

    def finish(self, scores: str = "") -> None:
        """Write the last line and close the file: nothing can be charged afterwards.

        Args:
            scores: SHA-256 of the file of an auditor's coins and scores; empty without an auditor.
        """
        self._append({"kind": "end", "releases": self.releases, **({"scores": scores} if scores else {})})
        self.close()

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, record: dict[str, Any]) -> None:
        self._write(encode(record))

    def _write(self, body: str) -> None:
        line, chain = seal(body, self.chain)
        self._put(line)
        self.chain = chain

    def _put(self, line: bytes) -> None:
        """Add bytes to the file, durable when this returns. Raises: LedgerError, and none of them is in the file."""
        if self._descriptor < 0:
            raise LedgerError(f"{self.path}: is closed. Fix: resume it.")
        length = os.fstat(self._descriptor).st_size
        if os.getpid() != self._process or length != self._length:
            # The lock does not stop a forked process, nor one that never asks for it: their lines would be overwritten.
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
        self._length = length + len(line)


def check_same_run(path: Path, header: RunHeader, existing: RunHeader) -> None:
    """Raise LedgerError if the ledger at ``path``, which has the header ``existing``, is not of the run ``header``."""
    if changed := header.differences(existing):
        problem = f"was started with other settings ({', '.join(changed)})"
        raise LedgerError(f"{path}: {problem}. Fix: restore the earlier settings; or {fresh_start(path.parent)}.")


def _older(older_format: int) -> str:
    return f"is of format {older_format}, which can be verified but not resumed: this dptune writes format {FORMAT}."


def _lock(descriptor: int, path: Path) -> None:
    if not lock_now(descriptor):
        holder = holder_of(descriptor)
        os.close(descriptor)
        problem = f"{path}: another process is charging it{holder}"
        raise LedgerError(f"{problem}. Fix: wait for that process or stop it.")
    # Between opening the file and locking it, another process may have removed or replaced its name.
    if not path.exists() or os.stat(path).st_ino != os.fstat(descriptor).st_ino:
        os.close(descriptor)
        raise LedgerError(f"{path}: another process replaced it just now. Fix: try again.")


def _cut_unacknowledged_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    tail_length = min(size, 1 << 16)
    tail = os.pread(descriptor, tail_length, size - tail_length)
    if tail and not tail.endswith(b"\n"):
        os.ftruncate(descriptor, size - tail_length + tail.rfind(b"\n") + 1)
    # Whole lines may not be on the disk yet either: in a power cut, a checkpoint could outlive the line it relies on.
    os.fsync(descriptor)
