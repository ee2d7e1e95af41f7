"""Runs a flow as a command: no traceback, one sentence as the last line, and an end within seconds on Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import psutil

from flows.failures import FlowError
from flows.server import cancel_run, start_server
from tasks.stage import INTERRUPTED, say_error

_SECONDS = 3.0


def run_flow(work: Callable[[], object], standing: Callable[[], str] = lambda: "") -> None:
    """Run a flow. If parts failed, the last line says how many, and the cause of the first failure.

    Args:
        standing: function that says how far the flow came, for the last line after Ctrl-C.
    """
    plain = _Plain()
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(plain)
    try:
        with _interruptible(standing):
            start_server()
            work()
    except FlowError as error:
        print(error.summary, file=sys.stderr)
        say_error(error.cause)
        sys.exit(error.status)


class _Plain(logging.Filter):
    """Removes tracebacks from Prefect's lines (``flow_error`` keeps them in a file), and its server's start and end."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("prefect"):
            record.exc_info = record.exc_text = None
        return not record.getMessage().startswith(("Starting temporary server", "Stopping temporary server"))


@contextmanager
def _interruptible(standing: Callable[[], str]) -> Iterator[None]:
    """Context in which Ctrl-C kills this process and all that it started. Files on disk are safe against kills.

    What Prefect itself makes of a KeyboardInterrupt took minutes.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        logging.disable(logging.CRITICAL)
        cancel_run()
        _end_children()
        where = ""
        with suppress(Exception):  # nothing may keep the process from ending
            where = standing()
        # Inside a flow, Prefect makes log lines of what is printed.
        sys.stderr.write(f"\nstopped{where and ' '}{where}; run again to go on\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    before: Any = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_children() -> None:
    """End every process that this one started, and theirs: first by SIGTERM, then by SIGKILL."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=_SECONDS)[1]:
        with suppress(psutil.Error):
            child.kill()
