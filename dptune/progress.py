"""Progress of long work: a bar in a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from tqdm import tqdm

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 10.0
_log = logging.getLogger("dptune.progress")


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
        self._started = self._spoke = time.monotonic()
        size = shutil.get_terminal_size()
        self._bar = tqdm(
            desc=description,
            total=total,
            initial=done,
            unit=unit or "it",
            unit_scale=unit == "B",
            leave=keep,
            disable=not sys.stderr.isatty(),
            # A terminal that does not tell its size says 0 and 0, and tqdm would then draw nothing at all.
            ncols=size.columns,
            nrows=size.lines,
        )

    def update(self, done: int) -> None:
        """Say that ``done`` in all are finished."""
        self._bar.update(done - self.done)
        self.done = done
        if self._bar.disable and time.monotonic() - self._spoke >= _SECONDS_BETWEEN_LINES:
            self._say("")

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
