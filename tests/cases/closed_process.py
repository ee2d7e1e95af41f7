"""A command in a process of its own, as a user who may not use every file, or with a limit on the size of files."""

from __future__ import annotations

import logging
import os
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_NOBODY = 65534


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status, negative for a signal.
        output: the lines that it printed, without empty ones.
    """

    status: int
    output: list[str]


def run_closed(work: Callable[[], Any], folder: Path, *, largest_file: int | None = None) -> Ended:
    """Do the work in a fork of this process, in ``folder``; as root, it first becomes another user.

    Modules that the work imports must have been imported before: another user may not read this checkout.

    Args:
        largest_file: the most bytes that a file may get, as ``ulimit -f`` sets it; a longer one fails as on a full
            disk.
    """
    reading, writing = os.pipe()  # a file would have the limit too
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        _work_and_exit(work, folder, writing, largest_file)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return Ended(status, [line for line in said.splitlines() if line.strip()])


def _work_and_exit(work: Callable[[], Any], folder: Path, writing: int, largest_file: int | None) -> None:
    status = 99
    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # pytest took the others
        for logger in (logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))):
            logger.handlers.clear()  # such as Prefect's, which tests before installed: they write to pytest's files
        os.chdir(folder)
        torch.set_num_threads(1)  # the threads of the process that was forked are gone
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        work()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def hand_over(folder: Path) -> None:
    """Make a folder and all that it holds the other user's, if this process is root's."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, _NOBODY, _NOBODY)


def close(path: Path, mode: int = 0) -> None:
    """Take a path's rights away; as root, its owner's too."""
    if os.getuid() == 0:
        os.chown(path, 0, 0)
    path.chmod(mode)
