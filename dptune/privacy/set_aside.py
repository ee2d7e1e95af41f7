"""Runs that cannot go on: their folders are kept, ledger and all, and are priced beside the runs that take their place.

What a run released stays released, whatever becomes of its folder. A ledger that was charged is all that is left to
price it by, so it is set aside and never removed: ``<run>`` becomes ``<run>.set-aside-1``, in the same place, and the
next run of that name starts in a folder of its own. Whoever states what runs on the same records cost together counts
both, by ``spending_of``.
"""

from __future__ import annotations

import fcntl
import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dptune.errors import ConfigError, DptuneError
from dptune.files import fsync_directory, locked
from dptune.privacy.ledger_file import LedgerContents, LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder

_SUFFIX = ".set-aside-"
_MOST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class Spending:
    """What a run released, whether it ended or not. Public.

    Attributes:
        folder: its name.
        unit: whose privacy; empty where no ledger says it.
        data: label of the records; empty where no ledger says it.
        releases: charged so far.
        epsilon: certified, at ``delta``, of these releases; infinite where they leak, or where nobody can tell.
        problem: why nobody can tell what it spent; empty otherwise.
    """

    folder: str
    unit: str
    data: str
    releases: int
    epsilon: float
    delta: float
    problem: str = ""

    def __str__(self) -> str:
        """A clause: what it has spent."""
        if self.problem:
            return f"nobody can tell what it has spent ({self.problem}), so that it counts as infinite"
        one = f" about one {self.unit}" if self.unit else ""
        return f"it has spent epsilon {self.epsilon:.4g}, delta {self.delta:g}{one} ({self.releases} releases)"


def spending_of(folder: Path) -> Spending | None:
    """What the run in ``folder`` has spent, from its ledger alone; None if nothing was charged."""
    path, released = RunFolder(folder).ledger, _has_released(folder)
    if not path.exists():
        return _unknown(folder, "its ledger is missing") if released else None
    if not path.is_file():
        return _unknown(folder, "its ledger is no file")
    try:
        contents = _acknowledged(path)
    except LedgerError:
        return _unknown(folder, "its ledger is damaged") if released or b"\n" in path.read_bytes() else None
    if contents.releases == 0:
        return _unknown(folder, "its ledger holds no release") if released else None
    if contents.releases < _witnessed_releases(folder):
        return _unknown(folder, "its ledger was cut: files beside it rely on more releases")
    header, certified = contents.header, contents.epsilons.certified
    return Spending(folder.name, header.unit, header.data, contents.releases, certified, header.delta)


def set_aside(folder: Path) -> tuple[Path, Spending | None]:
    """Rename a run's folder, so that the next run of its name starts afresh beside it.

    Returns: where it lies now, and what it spent (None if nothing was charged).

    Raises: ConfigError if it is no run's folder, or set aside already; DptuneError if a process works on it, or one
    of its files cannot be used.
    """
    folder = Path(folder)
    run = RunFolder(folder)
    if not any(file.exists() for file in (run.ledger, run.cell, run.job, *run.released)):
        raise ConfigError(str(folder), "is no run's folder", fix="give one, such as data/runs/<run>")
    if _SUFFIX in folder.name:
        raise ConfigError(str(folder), "is set aside already", fix="leave it: it is counted where it lies")
    try:
        with _unused(folder):
            spent = spending_of(folder)
            taken = {path.name for path in folder.parent.iterdir()}  # files and links that lead nowhere too
            number = next(n for n in range(1, len(taken) + 2) if f"{folder.name}{_SUFFIX}{n}" not in taken)
            target = folder.with_name(f"{folder.name}{_SUFFIX}{number}")
            folder.rename(target)
            fsync_directory(target.parent)
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}, so that {folder} cannot be set aside"
        raise DptuneError(f"{problem}. Fix: make it a file, or a folder, that can be written.") from None
    return target, spent


def fresh_start(folder: Path) -> str:
    """The fix for a run that cannot go on, with its price: what an error tells the user to do."""
    spent = spending_of(folder)
    command = f"`dptune set-aside {shlex.quote(str(folder))}`"
    if spent is None:
        return f"{command} lets the next run start afresh; nothing was charged to this one"
    return f"{command} keeps its ledger and lets the next run start afresh and spend again: {spent}"


def earlier_runs(folder: Path) -> list[Path]:
    """The folders that were set aside so that ``folder`` could start afresh."""
    start = f"{folder.name}{_SUFFIX}"
    return sorted(path for path in folder.parent.iterdir() if path.name.startswith(start) and path.is_dir())


def _has_released(folder: Path) -> bool:
    """Whether a file shows that noise was drawn. The state from before the first charge shows none."""
    run = RunFolder(folder)
    return any(file.exists() and (file not in run.states or _checkpointed_releases(file) != 0) for file in run.released)


def _witnessed_releases(folder: Path) -> int:
    """How many releases the files beside the ledger rely on, at least; a damaged one tells nothing."""
    run = RunFolder(folder)
    known = [_checkpointed_releases(file) or 0 for file in run.states]
    for file in (run.served, run.result):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            known.append(int(json.loads(file.read_text(encoding="utf-8"))["releases"]))
    return max(known)


def _checkpointed_releases(path: Path) -> int | None:
    """How many releases a checkpoint or state relies on, from its file's header alone; None if it does not say."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            progress = json.loads(json.loads(file.read(min(size, _MOST_HEADER)))["__metadata__"]["progress"])
        return int(progress["releases"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _unknown(folder: Path, problem: str) -> Spending:
    return Spending(folder.name, "", "", 0, math.inf, 0.0, problem)


def _acknowledged(path: Path) -> LedgerContents:
    """The ledger without a last line that was cut off in writing: no noisy value came of that, as no newline did."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if not whole or whole == content:
        return read_ledger(path)
    with TemporaryDirectory(prefix="dptune-") as scratch:
        (copy := Path(scratch) / path.name).write_bytes(whole)
        try:
            return read_ledger(copy)
        except LedgerError as error:
            raise LedgerError(str(error).replace(str(copy), str(path))) from None


@contextmanager
def _unused(folder: Path) -> Iterator[None]:
    """Hold the locks of the folder and of its ledger. Raises: DptuneError if a process has one of them."""
    run = RunFolder(folder)
    with locked(run.lock):
        if not run.ledger.exists():
            yield
            return
        with run.ledger.open("rb") as ledger:
            try:
                fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                problem = f"{run.ledger}: another process is charging it. Fix: wait for that process or stop it."
                raise LedgerError(problem) from None
            yield
