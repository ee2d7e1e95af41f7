"""How a run of a rehearsal ended, in its folder: written as soon as that is known, and read by whatever comes later.

A run that diverged is not resumed, though with other noise it might end well; and the weights of a run that was only to
be measured need not stay. A process that dies while it trains is another matter: its run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from dptune.errors import DivergedError
from dptune.files import write_json
from dptune.privacy.run_folder import RunFolder
from dptune.tuning.deliverable import partial_of
from dptune.tuning.prepare import PreparedRun
from dptune.tuning.run import Tuned, check_same

_log = logging.getLogger(__name__)

#: In a run's folder: its figure, infinite where it diverged.
FILE = "outcome.json"


def unless_diverged(prepared: PreparedRun, out: Path, work: Callable[[], Tuned]) -> Tuned | None:
    """The finished run; None if it diverged, now or in an earlier call.

    Raises: ConfigError if the run in ``out`` diverged with other settings or records.
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


def forget_weights(out: Path) -> None:
    """Remove a run's weights. Its ledger and its result, which price it, stay."""
    folder = RunFolder(out)
    for path in (folder.adapter, partial_of(folder)):
        shutil.rmtree(path, ignore_errors=True)
    for path in (
        folder.checkpoint,
        *out.glob(f".{folder.checkpoint.name}.*"),
    ):  # the latter of a kill while it was written
        path.unlink(missing_ok=True)


def _known(prepared: PreparedRun, out: Path) -> float | None:
    if not (out / FILE).exists():
        return None
    check_same(prepared, RunFolder(out))
    return float(json.loads((out / FILE).read_text(encoding="utf-8"))["figure"])


def _keep(out: Path, figure: float) -> None:
    write_json(out / FILE, {"figure": str(figure)})
