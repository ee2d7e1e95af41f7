"""Run a module in this process, which ends with the one that started it, even where that one was killed.

    python -m flows.child PARENT MODULE [ARGUMENT...]        # PARENT: the process id that must live on

A killed worker stops nothing any more: its cell would go on, hold the cell's lock and keep out its successor.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
import time

_SECONDS = 0.5


def child(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` for as long as this process lives."""
    return [sys.executable, "-m", "flows.child", str(os.getpid()), module, *arguments]


def end_server_with_me() -> None:
    """Let Prefect's temporary server, if this process started one, end with this process, however that ends.

    Prefect stops it at a normal exit only; a killed flow would leave it behind for ever.
    """
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer().server_process
    if server is not None and server.pid not in _watched:
        # The pipe has no other writer, so the kernel closes it with this process. In a session of its own, or Ctrl-C
        # would end the watcher first.
        command = ["sh", "-c", "cat >/dev/null; kill $0 2>/dev/null", str(server.pid)]
        _watched[server.pid] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


_watched: dict[int, subprocess.Popen[bytes]] = {}  # kept, for a collected one would close its pipe


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
