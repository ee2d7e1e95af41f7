"""A process that is killed at a chosen call of the system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Calls by which files get their content, names and times.
_CALLS = ((os, "fsync"), (os, "replace"), (os, "utime"), (os, "unlink"), (Path, "rename"), (Path, "write_text"))
_KILLED = 9


def killed_at_each_call(work: Callable[[], Any], prepare: Callable[[], Any]) -> Iterator[int]:
    """Do the work in a process of its own, which is killed at its first call, at its second, ...; last, at none.

    Yields: the number of calls that it made, after each.
    """
    number, status = 0, _KILLED
    while status == _KILLED:
        prepare()
        process = os.fork()
        if not process:
            _count(number)
            work()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status in (0, _KILLED)
        yield number
        number += 1


def _count(left: int) -> None:
    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(_KILLED)
            return real(*given, **more)

        return call

    for owner, name in _CALLS:
        setattr(owner, name, counted(getattr(owner, name)))
