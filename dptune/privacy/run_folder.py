"""The folder of a run, the names of its files, and folders that are set aside: runs that cannot go on.

A run that is set aside is priced together with the run that replaces it.
A release stays released, whatever becomes of the run's folder. Only its charged ledger can price it, so the ledger is
set aside and never removed: ``<run>`` becomes ``<run>.set-aside-1``, in the same place, and the next run of that name
starts in a new folder. The total cost of runs on the same records includes both, by ``spending_of``.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import DamagedFileError, fsync_directory, holder_of, lock_now, locked, read_json
from dptune.privacy.certificate import FILE as CERTIFICATE
from dptune.privacy.certificate import read_certificate
from dptune.privacy.ledger_file import LedgerContents, LedgerError, is_complete, read_ledger

#: Key of ``RunFolder.cell`` from the moment on in which the run has a ledger.
CHARGES = "charges"


class RunFolder:
    """The paths of a run's files. No other module spells these names.

    Attributes:
        path: the folder; it need not exist.
        ledger: the run's ledger.
        checkpoint: weights, optimizer and controller of a fine-tuning run that is under way.
        state: the releases of a policy run so far; ``progress`` is its curve.
        adapter: folder of the weights, PEFT's.
        controller: folder of a learned hyper-policy.
        history: points of the learning curves; ``knobs`` are the mechanism's settings along the way.
        served: number of answers that an ensemble gave.
        failure: the error of a run that diverged, which is not resumed: with other noise it might end well.
        result: figures of a finished run, for the report.
        results: the same for a run that makes several things at once.
        cell: settings of the run; of a policy run, ``policy_cell``.
        booking: which records pay for the run, and the register that counts it.
        canaries: coins and scores of the gradients that an auditor planted in a run of ``tune``. Private.
        crafted: the same of a pipeline's cell, among the secrets of its workspace. Private.
        lock: lock of the process that works in the folder.
        searching: of a search, the secret folder beside this one, which holds it until its winner is out.
        mlflow_run: id of the run in MLflow.

    Example:
        >>> from pathlib import Path
        >>> from dptune.privacy.run_folder import RunFolder
        >>> folder = RunFolder(Path("tuned"))
        >>> folder.ledger.as_posix(), folder.has_begun
        ('tuned/ledger.jsonl', False)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"
        self.checkpoint = path / "checkpoint.safetensors"
        self.state = path / "state.safetensors"
        self.progress = path / "progress.json"
        self.adapter = path / "adapter"
        self.controller = path / "controller"
        self.history = path / "history.jsonl"
        self.knobs = path / "knobs.jsonl"
        self.served = path / "served.json"
        self.failure = path / "failure.json"
        self.result = path / "result.json"
        self.results = path / "results.json"
        self.cell = path / "cell.json"
        self.policy_cell = path / "job.json"
        self.booking = path / "booking.json"
        self.canaries = path / "audit_canaries.json"
        self.lock = path / "lock"
        self.mlflow_run = path / "mlflow_run"
        whole = path.absolute()
        self.crafted = whole.parent.parent / "secrets" / "crafted" / f"{whole.name}.json"
        self.searching = whole.with_name(f".{whole.name}.searching") if whole.name else whole / ".searching"

    @property
    def is_secret(self) -> bool:
        """Whether the folder lies in the secret folder of a search, as those of its candidates do."""
        return any(part.startswith(".") and part.endswith(".searching") for part in self.path.absolute().parts)

    @property
    def settings(self) -> dict[str, Any]:
        """What the folder's run was started with; empty for a new one. Raises: DamagedFileError."""
        if not self.cell.exists():
            return {}
        fix = f"restore it; or `dptune set-aside {shlex.quote(str(self.path))}`, after which the next run spends again"
        if not (found := read_json(self.cell, fix=fix)):
            raise DamagedFileError(f"{self.cell}: holds no settings. Fix: {fix}.")
        return found

    @property
    def has_begun(self) -> bool:
        """Whether the run's ledger has its first line; without that nothing was charged to it."""
        if not self.ledger.is_file():
            return False
        with self.ledger.open("rb") as file:
            return file.readline().endswith(b"\n")

    @property
    def lost_its_ledger(self) -> bool:
        """Whether somebody removed the run's ledger, or emptied it: what it released stays released."""
        return bool(self.settings.get(CHARGES)) and not self.has_begun

    @property
    def states(self) -> tuple[Path, ...]:
        """Files whose headers state how many releases they rely on. They also exist before the first charge."""
        return self.checkpoint, self.state

    @property
    def released(self) -> tuple[Path, ...]:
        """Files that prove that the run released something, even if its ledger is missing or empty."""
        outcome = (self.adapter, self.controller, self.history, self.knobs, self.served, self.result, self.results)
        return *self.states, *outcome

    @property
    def is_finished(self) -> bool:
        """Whether a fine-tuning run has ended, and left its result."""
        return self.result.exists() and is_complete(self.ledger)


_SUFFIX = ".set-aside-"
_MOST_HEADER = 100_000_000  # largest header in bytes, by safetensors' own limit


@dataclass(frozen=True)
class Spending:
    """The cost of a run's releases, whether the run ended or not. Public.

    Attributes:
        folder: name of the run's folder.
        unit: unit of privacy; empty if no ledger states it.
        data: label of the records; empty if no ledger states it.
        releases: number of releases charged so far.
        epsilon: certified epsilon of these releases at ``delta``; infinite if they leak, or if it is unknown.
        problem: reason why the cost is unknown; empty if it is known.
        search: id of the search that costs this as a whole, however many releases it made; empty for a run.
    """

    folder: str
    unit: str
    data: str
    releases: int
    epsilon: float
    delta: float
    problem: str = ""
    search: str = ""

    def __str__(self) -> str:
        """The cost as a clause, for messages."""
        if self.problem:
            return f"it is unknown what it has spent ({self.problem}), so it counts as infinite"
        about = f" about one {self.unit}" if self.unit else ""
        price = f"epsilon {at_most(self.epsilon, 4)}, delta {at_most(self.delta)}{about}"
        if self.search:
            return f"the whole search costs {price}, from its start"
        return f"it has spent {price} ({self.releases} releases)"


def spending_of(folder: Path) -> Spending | None:
    """The cost of the run in ``folder``, from its ledger alone; None if nothing was charged.

    Of a search it is the whole search's from its start, by its certificate.
    """
    if certificate := certificate_of(folder):
        return _cost_of_search(folder, certificate)
    path, released = RunFolder(folder).ledger, _has_released(folder)
    if _kind_of(folder) == "search":
        return unknown_cost(folder, "the certificate of its search is missing")
    if not path.exists():
        return unknown_cost(folder, "its ledger is missing") if released else None
    if not path.is_file():
        return unknown_cost(folder, "its ledger is not a file")
    try:
        contents = read_acknowledged(path)
    except LedgerError:
        return unknown_cost(folder, "its ledger is damaged") if released or b"\n" in path.read_bytes() else None
    if contents.releases == 0:
        return unknown_cost(folder, "its ledger holds no release") if released else None
    if contents.releases < witnessed_releases(folder):
        return unknown_cost(folder, "its ledger was cut: files beside it rely on more releases")
    try:
        header, certified = contents.header, contents.epsilons.certified
    except ConfigError as error:  # a sampler of which no accountant bounds so many steps, say
        return unknown_cost(folder, f"its ledger has no price: {error.problem}")
    return Spending(folder.name, header.unit, header.data, contents.releases, certified, header.delta)


def set_aside(folder: Path) -> tuple[Path, Spending | None]:
    """Rename a run's folder, so that the next run of its name starts afresh beside it.

    The secret folder of a search goes with it: the search could not go on in one without the other.

    Returns: the new path, and the run's cost (None if nothing was charged).

    Raises: ConfigError if it is not a run's folder, or set aside already; DptuneError if a process works on it, or one
    of its files cannot be used.
    """
    folder = Path(folder)
    run = RunFolder(folder)
    if run.is_secret:
        problem = "is part of a search, whose price allows each candidate one run"
        raise ConfigError(str(folder), problem, fix="restore its files, or set the search's own folder aside")
    known = (run.ledger, run.cell, run.policy_cell, run.searching, *run.released)
    if not folder.exists() or not any(file.exists() for file in known):
        raise ConfigError(str(folder), "is not a run's folder", fix="give one, such as data/runs/<run>")
    if _SUFFIX in folder.name:
        raise ConfigError(str(folder), "is set aside already", fix="leave it in place: the report counts it there")
    try:
        with _hold_locks(folder):
            spent = spending_of(folder)
            taken = {path.name for path in folder.parent.iterdir()}  # ``exists`` would miss dangling links
            number = next(n for n in range(1, len(taken) + 2) if f"{folder.name}{_SUFFIX}{n}" not in taken)
            target = folder.with_name(f"{folder.name}{_SUFFIX}{number}")
            if run.searching.exists():
                run.searching.rename(RunFolder(target).searching)
            folder.rename(target)
            fsync_directory(target.parent)
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}, so {folder} cannot be set aside"
        raise DptuneError(f"{problem}. Fix: make {folder} and {folder.parent} folders that you can write in.") from None
    return target, spent


def fresh_start(folder: Path) -> str:
    """The fix that an error message states for a run that cannot go on, with the run's cost."""
    spent = spending_of(folder)
    command = f"`dptune set-aside {shlex.quote(str(folder))}`"
    if spent is None:
        return f"{command} lets the next run start afresh; nothing was charged to this one"
    return f"{command} keeps its ledger and lets the next run start afresh and spend again: {spent}"


def earlier_runs(folder: Path) -> list[Path]:
    """The folders that were set aside so that ``folder`` could start afresh."""
    start = f"{folder.name}{_SUFFIX}"
    return sorted(path for path in folder.parent.iterdir() if path.name.startswith(start) and path.is_dir())


def certificate_of(folder: Path) -> Path | None:
    """The certificate of the search in ``folder``, under way or ended; None of a run."""
    run = RunFolder(folder)
    places = (run.searching, run.adapter, folder)
    return next((place / CERTIFICATE for place in places if (place / CERTIFICATE).exists()), None)


def _cost_of_search(folder: Path, path: Path) -> Spending:
    try:
        found = read_certificate(path)
    except LedgerError:
        return unknown_cost(folder, "its certificate is damaged")
    return Spending(folder.name, found.unit, found.data, 0, found.certified, found.delta, search=found.id)


def _kind_of(folder: Path) -> Any:
    """What the folder's settings say was begun there; None where they say nothing, or are damaged."""
    with suppress(DamagedFileError):
        return RunFolder(folder).settings.get("kind")
    return None


def _has_released(folder: Path) -> bool:
    """Whether a file proves that noise was drawn. The state saved before the first charge proves nothing."""
    run = RunFolder(folder)
    return any(file.exists() and (file not in run.states or _checkpointed_releases(file) != 0) for file in run.released)


def witnessed_releases(folder: Path, *, states: bool = True) -> int:
    """A lower bound on the releases that the files beside the ledger rely on; damaged files do not count."""
    run = RunFolder(folder)
    known = [0, *(_checkpointed_releases(file) or 0 for file in run.states if states)]
    for file in (run.served, run.result):
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            known.append(int(read_json(file)["releases"]))
    return max(known)


def _checkpointed_releases(path: Path) -> int | None:
    """Number of releases that a checkpoint or state relies on, read from its header alone; None if it has none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            progress = json.loads(json.loads(file.read(min(size, _MOST_HEADER)))["__metadata__"]["progress"])
        return int(progress["releases"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def unknown_cost(folder: Path, problem: str) -> Spending:
    """The cost of a run that nobody can tell, and why."""
    return Spending(folder.name, "", "", 0, math.inf, 0.0, problem)


def read_acknowledged(path: Path) -> LedgerContents:
    """Read the ledger, without a last line that was cut off in writing: no noisy value was drawn for such a line."""
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
def _hold_locks(folder: Path) -> Iterator[None]:
    """Hold the locks of the folder and of its ledger. Raises DptuneError if another process holds one of them."""
    run = RunFolder(folder)
    with locked(run.lock):
        if not run.ledger.exists():
            yield
            return
        with run.ledger.open("rb") as ledger:
            if not lock_now(ledger.fileno()):
                problem = f"{run.ledger}: another process is charging it{holder_of(ledger.fileno())}"
                raise LedgerError(f"{problem}. Fix: wait for that process or stop it.")
            yield


# Runs in the folder of another run: those that check a rehearsal's ranking lie in that of its winner.


#: In the folder of a rehearsal's winner: the runs that check the ranking, each in a folder of its own.
FOLDER = "ranking"


def runs_within(folder: Path) -> list[Path]:
    """The folders of the runs in the folder of another one, those that were set aside included."""
    within = folder / FOLDER
    return sorted(path for path in within.iterdir() if path.is_dir()) if within.is_dir() else []


def spending_within(folder: Path) -> list[Spending]:
    """What each run in the folder of another one has spent, where anything was charged to it."""
    return [spent for run in runs_within(folder) if (spent := spending_of(run))]


def said_within(folder: Path) -> str:
    """What those runs have spent, and all in the folder together, as the end of a sentence; empty if they are none."""
    within = spending_within(folder)
    if not within:
        return ""
    own = spending_of(folder)
    total = [*within, *([own] if own else [])]
    runs = f"{len(within)} runs that check its ranking have" if len(within) > 1 else "a run that checks its ranking has"
    unknown = sum(bool(one.problem) for one in total)
    but = f", because it is unknown what {unknown} of them spent" if unknown else ""
    return f"; {runs} spent {_together(within)} beside that, {_together(total)} in all{but}"


def _together(spent: list[Spending]) -> str:
    """Their sum, by basic composition."""
    epsilon, delta = math.fsum(one.epsilon for one in spent), math.fsum(one.delta for one in spent)
    return f"epsilon {at_most(epsilon, 4)}, delta {at_most(delta)}"
