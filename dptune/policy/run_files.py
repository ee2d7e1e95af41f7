"""Files of a policy run: its ledger and its released state. A run that died resumes only under the same schedule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import read_json, replacing, write_json
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Booked, Ledger, check_same_run
from dptune.privacy.ledger_file import is_complete, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.training.models.weight_files import read_tensors

Point = TypeVar("Point")


def open_ledger(
    directory: Path,
    header: RunHeader,
    planned: Composition,
    schedule: Mapping[str, Any],
    entropy: Entropy,
    booked: Booked = nullcontext,
) -> Ledger:
    """Start or resume the ledger of the run in ``directory``.

    Args:
        directory: the run's folder.
        planned: releases of the whole run.
        schedule: everything public that decides who is in which update, in plain JSON types. The ledger's header holds
            its digest.
        entropy: source of the run's noise; the header must declare its leaks.
        booked: makes the context in which a new ledger gets its first line.

    Raises: ConfigError if the header does not declare the entropy's leaks; BudgetError if the plan exceeds the budget;
        LedgerError for the ledger of another run or another schedule (users would have other numbers, and some would
        be in two updates), or if there is released state without its ledger.
    """
    if entropy.leaks != header.leaks:
        raise ConfigError("header.leaks", "does not declare the run's entropy", fix="give it entropy.leaks")
    return Ledger.open(RunFolder(directory).ledger, _with_schedule(header, schedule), planned, booked)


def save_state(path: Path, tensors: Mapping[str, torch.Tensor], releases: int) -> None:
    """Write the released state, and the number of releases that it was made from.

    A run saves once before its first charge, so that an unwritable disk ends it before it has spent anything.
    """
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"progress": json.dumps({"releases": releases})})


def save_progress(directory: Path, tensors: Mapping[str, torch.Tensor], points: Sequence[Any], releases: int) -> None:
    """Save the state, then the points of the curve.

    If the process dies in between, the last point is missing from the file; no point is of a state that was lost.
    """
    save_state(RunFolder(directory).state, tensors, releases)
    write_json(RunFolder(directory).progress, [vars(point) for point in points])


def read_progress(directory: Path, kind: type[Point]) -> tuple[dict[str, torch.Tensor], list[Point]]:
    """Read the tensors and the points that ``save_progress`` wrote.

    Args:
        kind: dataclass of the points.
    """
    folder = RunFolder(directory)
    points = read_json(folder.progress, lambda found: [kind(**values) for values in found], kind=list)
    return read_tensors(folder.state), points


def is_finished(directory: Path, header: RunHeader, schedule: Mapping[str, Any]) -> bool:
    """Whether the run in ``directory`` has ended.

    Raises: LedgerError if it ended under another header or schedule.
    """
    path = RunFolder(directory).ledger
    finished = is_complete(path)
    if finished:
        check_same_run(path, _with_schedule(header, schedule), read_ledger(path).header)
    return finished


def _with_schedule(header: RunHeader, schedule: Mapping[str, Any]) -> RunHeader:
    return replace(header, schedule=hashlib.sha256(json.dumps(schedule, sort_keys=True).encode()).hexdigest())


# Check that no user is in two updates of a run: the run's epsilon is that of a single update only if so.


class UserReuseError(DptuneError):
    """Raised if a user arrives a second time: the guarantee is for users who are in one update."""


class UserRegister:
    """Numbers of all users who were in an update of a run. Private."""

    def __init__(self) -> None:
        self._users: set[int] = set()

    def admit(self, users: tuple[int, ...]) -> None:
        """Add the users of one update. Raises: UserReuseError naming the first who was in an update already."""
        for user in users:
            if user in self._users:
                raise UserReuseError(
                    f"user {user} is in a second update, and the guarantee is for users who are in one. "
                    "Fix: reset the environment for every user (continuing: false)."
                )
            self._users.add(user)
