"""Runs a module in this process, and ends the process when the one that started it ends, even by a kill.

    python -m flows.common.child PARENT MODULE [ARGUMENT...]        # PARENT: the process id that must live on

Otherwise the cell of a killed worker would go on, hold its lock, and keep the cell's next attempt waiting. A cell that
trains ends after its step, with a checkpoint. What the module itself started, such as a stage of DVC's, ends with it:
when the parent ends, and on SIGTERM.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

import psutil

_SECONDS = 0.5
#: Time for the end of a step. A module that does not wait for one ends at once.
_GRACE_SECONDS = 8.0


def child(module: str, *arguments: str) -> list[str]:
    """Make the command that runs ``module`` for as long as this process lives."""
    return [sys.executable, "-m", "flows.common.child", str(os.getpid()), module, *arguments]


def end_with(parent: int) -> None:
    """End this process, and all that it started, soon after its parent ended: by SIGTERM, and then by a kill."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    started = _terminate_started()  # before this process, which may end at once
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    for one in started:
        with suppress(psutil.Error):
            one.kill()
    os._exit(1)  # as a kill would; files on disk are safe against kills


def _end(number: int, _frame: FrameType | None) -> None:
    """End this process on SIGTERM as if it had no handler, and what it started too; DVC passes nothing on."""
    signal.signal(number, signal.SIG_IGN)  # a second one must not end this process before it has passed on the first
    _terminate_started()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _terminate_started() -> list[psutil.Process]:
    """Send SIGTERM to all that this process started. Returns them.

    Not to Prefect's temporary server, which has a session of its own: the flow tells it that it ends.
    """
    started = [one for one in psutil.Process().children(recursive=True) if _is_of_this_session(one.pid)]
    for one in started:
        with suppress(psutil.Error):
            one.terminate()
    return started


def _is_of_this_session(process: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getsid(process) == os.getsid(0)
    return False


def main() -> None:
    """Watch the parent, and run the module as if it had been the command."""
    parent, module = sys.argv[1:3]
    end_with(int(parent))
    signal.signal(signal.SIGTERM, _end)
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
