"""Forked processes: code runs in a copy of this process, which has imported what is slow to import.

A new interpreter takes five seconds to import PyTorch, Transformers and PEFT; a fork takes a few milliseconds, and what
it changes ends with it. Use it where a test needs modules of its own, and not where it needs a clean interpreter.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

#: Packages of this repository, which code of another tree must import anew.
OWN = ("dptune", "tasks", "flows", "docs")


def forked(work: Callable[[], None], folder: Path, *, packages: Path | None = None) -> tuple[int, str, str]:
    """Run ``work`` in a forked process; returns its exit status and what it wrote to its two outputs.

    Args:
        folder: its current directory.
        packages: where it finds ``OWN`` packages, all of which it imports anew; None keeps those that are imported.
    """
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if torch := sys.modules.get("torch"):
                    torch.set_num_threads(1)  # threads do not survive a fork, and would be waited for
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = out, err
                _redirect_logs()
                os.chdir(folder)
                if packages is not None:
                    _forget(packages)
                work()
                status = 0
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                err.flush()
                os._exit(status)
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:  # the time of the test is over
            os.kill(child, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def command(module: str, *arguments: str) -> Callable[[], None]:
    """What `python -m module arguments` does, as work for ``forked``."""

    def work() -> None:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    return work


def _redirect_logs() -> None:
    """Let handlers that libraries made at their import write to this process's outputs."""
    for logger in (logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))):
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # setStream would flush the old one, which an earlier test may have closed


def _forget(packages: Path) -> None:
    # Python compares a cached file with its source by second and size, and a quick edit may keep both.
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    sys.path.insert(0, str(packages))
    sys.path_importer_cache.clear()
