"""Run a module in this process, which ends with the one that started it, even where that one was killed.

    python -m flows.child PARENT MODULE [ARGUMENT...]        # PARENT: the process id that must live on

Without it, the cell of a killed worker would go on, hold its lock, and keep the cell's next attempt waiting.
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
    """End Prefect's temporary server, if this process started one, when this process ends, even if it is killed.

    Prefect itself stops the server at a normal exit only.
    """
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer().server_process
    if server is not None and server.pid not in _watched:
        # This process is the pipe's only writer, so the kernel closes the pipe when it ends. The watcher has a session
        # of its own; otherwise Ctrl-C would end it before the server.
        command = ["sh", "-c", "cat >/dev/null; kill $0 2>/dev/null", str(server.pid)]
        _watched[server.pid] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


_watched: dict[int, subprocess.Popen[bytes]] = {}  # holds a reference: a garbage-collected Popen would close its pipe


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)  # as a kill would; files on disk are safe against kills


def main() -> None:
    """Watch the parent, and run the module as if it had been the command."""
    parent, module = sys.argv[1:3]
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
