"""Ctrl-C and SIGTERM during a run: they wait for the end of the step, so that a checkpoint is written first.

Otherwise the releases since the last checkpoint would be charged, and their steps would be lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Context in which Ctrl-C and SIGTERM wait. Yields a function that says whether one of them came.

    At the context's end the signal that waits becomes a KeyboardInterrupt. A second Ctrl-C is one at once. Outside the
    main thread, which alone receives signals, nothing changes.
    """
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        again = number == signal.SIGINT and signal.SIGINT in came
        came.append(number)
        if again:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # Background processes ignore Ctrl-C; leave that unchanged.
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def ends_like_ctrl_c() -> Iterator[None]:
    """Context, or decorator, by which SIGTERM is a KeyboardInterrupt: what is half made goes, and a sentence is said.

    Only in the main thread, and where nobody else handles SIGTERM.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
