"""A run's files: its ledger, and its released state. A run that died goes on under the schedule that it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file

from dptune.errors import ConfigError
from dptune.files import replacing, write_json
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger, check_same_run
from dptune.privacy.ledger_file import is_complete, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader

Point = TypeVar("Point")


def open_ledger(
    directory: Path,
    header: RunHeader,
    planned: Composition,
    schedule: Mapping[str, Any],
    entropy: Entropy,
) -> Ledger:
    """Start or resume the ledger of the run in ``directory``.

    Args:
        schedule: everything that decides the order in which users arrive, in plain JSON types. Public; the ledger keeps
            its digest.
        entropy: source of the run's noise; the header must declare its leaks.

    Raises: ConfigError, BudgetError; LedgerError for a ledger of another run or schedule, whose users are numbered
        otherwise, so that some would be met twice, and for released state whose ledger is gone.
    """
    if entropy.leaks != header.leaks:
        raise ConfigError("header.leaks", "does not declare the run's entropy", fix="give it entropy.leaks")
    return Ledger.open(RunFolder(directory).ledger, _with_schedule(header, schedule), planned)


def save_state(path: Path, tensors: Mapping[str, torch.Tensor], releases: int) -> None:
    """Write the released state and the number of releases so far.

    A run also saves it before its first charge: if the disk takes no state, every new try would cost an update.
    """
    with replacing(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"progress": json.dumps({"releases": releases})})


def save_progress(directory: Path, tensors: Mapping[str, torch.Tensor], points: Sequence[Any], releases: int) -> None:
    """Save the state, then the points: a process that dies in between leaves points that are too old, never too new."""
    save_state(RunFolder(directory).state, tensors, releases)
    write_json(RunFolder(directory).progress, [vars(point) for point in points])


def read_progress(directory: Path, kind: type[Point]) -> tuple[dict[str, torch.Tensor], list[Point]]:
    """Read what ``save_progress`` wrote, with points of this kind."""
    points = json.loads(RunFolder(directory).progress.read_text(encoding="utf-8"))
    return load_file(RunFolder(directory).state), [kind(**values) for values in points]


def is_finished(directory: Path, header: RunHeader, schedule: Mapping[str, Any]) -> bool:
    """Whether the run in ``directory`` has ended. Raises: LedgerError if it is another one."""
    path = RunFolder(directory).ledger
    finished = is_complete(path)
    if finished:
        check_same_run(path, _with_schedule(header, schedule), read_ledger(path).header)
    return finished


def digest_of(units: Sequence[int]) -> str:
    """Digest of the order in which users arrive."""
    return hashlib.sha256(json.dumps(list(units)).encode()).hexdigest()


def _with_schedule(header: RunHeader, schedule: Mapping[str, Any]) -> RunHeader:
    return replace(header, schedule=hashlib.sha256(json.dumps(schedule, sort_keys=True).encode()).hexdigest())
