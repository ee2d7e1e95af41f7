"""Run a module in this process, which ends with the one that started it, even where that one was killed.

    python -m flows.child PARENT MODULE [ARGUMENT...]        # PARENT: the process id that must live on

A killed worker stops nothing any more: its cell would go on, hold the cell's lock and keep out its successor.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time

_SECONDS = 0.5


def child(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` for as long as this process lives."""
    return [sys.executable, "-m", "flows.child", str(os.getpid()), module, *arguments]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)  # like a kill: everything on disk is made for that


def main() -> None:
    """Watch the parent, and run the module as if it had been the command."""
    parent, module = sys.argv[1:3]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
