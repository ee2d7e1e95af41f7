"""Progress of long work: a bar in a terminal, a log line now and then elsewhere.

If the variable DPTUNE_PROGRESS_FILE names a file, every meter appends its events there as lines of JSON, so that one
display can show the meters of several processes. The events hold counts and no times.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Self, TypeVar

from tqdm import tqdm

T = TypeVar("T")
#: Name of the environment variable that names the file of events.
EVENTS = "DPTUNE_PROGRESS_FILE"

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_EVENTS = 0.3
_numbers = itertools.count()
_log = logging.getLogger("dptune.core.progress")


class Meter:
    """Shows how much of some work is done. Use as a context manager."""

    def __init__(
        self, description: str, *, total: int | None = None, done: int = 0, unit: str = "", keep: bool = False
    ) -> None:
        """Start at ``done`` of ``total``.

        Args:
            unit: what is counted; "B" is scaled to kB and MB.
            keep: leave the finished bar on the screen.
        """
        self._description, self._total, self._unit = description, total, unit
        self.done = done
        self._started = self._spoke = self._marked = time.monotonic()
        self._key = f"{os.getpid()}-{next(_numbers)}"
        self._mark()
        size = shutil.get_terminal_size()
        self._bar = tqdm(
            desc=description,
            total=total,
            initial=done,
            unit=unit or "it",
            unit_scale=unit == "B",
            leave=keep,
            # A notebook's page can draw a bar though it is no terminal.
            disable=not (sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")),
            # A terminal that does not tell its size says 0 and 0, and tqdm would then draw nothing at all.
            ncols=size.columns,
            nrows=size.lines,
        )

    def update(self, done: int) -> None:
        """Say that ``done`` in all are finished."""
        self._bar.update(done - self.done)
        self.done = done
        if time.monotonic() - self._marked >= _SECONDS_BETWEEN_EVENTS:
            self._mark()
        if self._bar.disable and time.monotonic() - self._spoke >= _SECONDS_BETWEEN_LINES:
            self._say("")

    def _mark(self, *, ended: bool = False) -> None:
        """Append an event to the file of events, if there is one. A failure to write must not end the work."""
        self._marked = time.monotonic()
        event = {"meter": self._key, "what": self._description, "done": self.done, "total": self._total}
        line = json.dumps({**event, "unit": self._unit, "ended": ended}) + "\n"
        if path := os.environ.get(EVENTS):
            with suppress(OSError):
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
                try:
                    os.write(descriptor, line.encode())
                finally:
                    os.close(descriptor)

    def _say(self, prefix: str) -> None:
        self._spoke = time.monotonic()
        of = f" of {self._total}" if self._total else ""
        unit = f" {self._unit}" if self._unit else ""
        seconds = self._spoke - self._started
        _log.info("%s: %s%d%s%s, %.0f s", self._description, prefix, self.done, of, unit, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._bar.close()
        self._mark(ended=True)
        if self._bar.disable and error is None:
            self._say("done, ")


def progress(
    items: Iterable[T], description: str, *, total: int | None = None, initial: int = 0, percent: bool = False
) -> Iterator[T]:
    """Pass the items through and show how far along they are.

    Args:
        total: how many items there are in all, if known.
        initial: how many were done before (a resumed run).
        percent: show the share of ``total`` that is done, and no numbers.
    """
    whole = total if percent else None
    with Meter(
        description, total=100 if whole else total, done=0 if whole else initial, unit="%" if whole else ""
    ) as meter:
        for done, item in enumerate(items, start=initial + 1):
            yield item
            meter.update(100 * done // whole if whole else done)
