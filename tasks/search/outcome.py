"""How a run of a rehearsal ended, in its folder: written as soon as that is known, and read by whatever comes later.

A run that diverged is not resumed, though with other noise it might end well; and the weights of a run that was only to
be measured need not stay. A process that dies while it trains is another matter: its run goes on from its checkpoint.
"""

from __future__ import annotations

import logging
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

from dptune.core.errors import ConfigError, DivergedError, DptuneError
from dptune.core.files import read_json, write_json
from dptune.job.delivery.weights import weights_in
from dptune.job.preparation import PreparedRun
from dptune.job.run import Tuned, check_same
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.set_aside import FOLDER, earlier_runs, runs_within, spending_of

_log = logging.getLogger(__name__)

#: In a run's folder: its figure, infinite where it diverged.
FILE = "outcome.json"


def unless_diverged(prepared: PreparedRun, out: Path, work: Callable[[], Tuned]) -> Tuned | None:
    """The finished run; None if it diverged, now or in an earlier call.

    Raises: ConfigError if the run in ``out`` diverged with other settings or records, or its ledger is missing.
    """
    if _known(prepared, out) is not None:
        return None
    try:
        return work()
    except DivergedError as error:
        _log.warning("%s", error)
        _keep(out, math.inf)
        return None


def figure_of(prepared: PreparedRun, out: Path, work: Callable[[], float]) -> float:
    """The figure of a run, from ``work`` the first time; infinite if it diverged. Raises: ConfigError likewise."""
    if (known := _known(prepared, out)) is not None:
        return known
    try:
        found = work()
    except DivergedError as error:
        _log.warning("%s", error)
        found = math.inf
    _keep(out, found)
    return found


def check_ended(prepared: PreparedRun, out: Path) -> None:
    """Raise ConfigError unless the run that ended in ``out`` is of these settings and records, and has its ledger."""
    if not RunFolder(out).ledger.exists():  # asked first: a run that lost its ledger is taken for a new one
        problem = f"{out} has ended, and its ledger, the only record of its cost, is missing"
        afresh = f"`dptune set-aside {shlex.quote(str(out))}` lets the next run start afresh and spend again"
        raise ConfigError("out", problem, fix=f"restore it, or {afresh}")
    check_same(prepared, RunFolder(out))


def forget_weights(out: Path) -> None:
    """Remove a run's weights. Its ledger and its result, which price it, stay.

    Raises: DptuneError if they lie behind a link, which is not followed: something else may be there.
    """
    for path in weights_in(out):
        if path.is_symlink():
            problem = f"{path}: is a link, and the weights behind it were not removed"
            raise DptuneError(f"{problem}. Fix: remove both; the next call goes on.")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_priced(out: Path) -> bool:
    """Whether a run's ledger tells what it released; else its weights may be all that says that it did."""
    return (spent := spending_of(out)) is not None and not spent.problem


def forget_losers(winner: Path, *, ended: bool) -> None:
    """Remove the weights of the runs that check a ranking, in the winner's folder, and warn of those that must stay.

    Those of a run that is to go on stay, and those that alone witness releases of which the ledger tells nothing.

    Args:
        ended: whether all of them have ended; else only those that say so, or were set aside.

    Raises: DptuneError as ``forget_weights``.
    """
    for run in runs_within(winner):
        aside = run in earlier_runs(run.with_name(run.name.partition(".")[0]))
        if weights_in(run) and (ended or aside or (run / FILE).exists()) and is_priced(run):
            forget_weights(run)
    if left := [run.name for run in runs_within(winner) if weights_in(run)]:
        _log.warning(
            "%s: weights of settings that were not chosen stay in it (%s): they have not ended, or their ledger is "
            "missing or damaged. Each has the proof of one run, and a page chose among them: do not publish them. With "
            "search.check_ranking, `make search` ends what has its ledger, and keeps only its figure",
            *(winner / FOLDER, ", ".join(left)),
        )


def _known(prepared: PreparedRun, out: Path) -> float | None:
    if not (out / FILE).exists():
        return None
    check_ended(prepared, out)
    return float(read_json(out / FILE)["figure"])


def _keep(out: Path, figure: float) -> None:
    write_json(out / FILE, {"figure": str(figure)})
