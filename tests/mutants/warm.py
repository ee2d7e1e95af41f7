"""A process that has imported what is slow to import, and forks itself for every run of pytest.

A run takes a second so, not the five that PyTorch and the others take to load. Nothing of the repository is imported
before a fork: every run reads the files as they lie then.

Reads one JSON list of arguments a line, for pytest; answers each with one line, [exit status, output].
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from tempfile import TemporaryFile


def main() -> None:
    """Import the modules that the command line names, and serve until the input ends."""
    for name in sys.argv[1:]:
        with suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            status = _forked(json.loads(line), output.fileno())
            output.seek(0)
            print(json.dumps([status, output.read()]), file=answers, flush=True)


def _forked(arguments: list[str], output: int) -> int:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = 3  # pytest's own for an error within itself
        try:
            import pytest

            status = int(pytest.main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main()
