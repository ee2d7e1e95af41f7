"""Progress of long work: a bar in a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
_SECONDS_BETWEEN_LINES = 15.0
_log = logging.getLogger("dptune.progress")


def progress(items: Iterable[T], description: str, *, total: int | None = None, initial: int = 0) -> Iterator[T]:
    """Pass the items through and show how far along they are.

    Args:
        total: how many items there are in all, if known.
        initial: how many were done before (a resumed run).
    """
    if sys.stderr.isatty():
        yield from tqdm(items, desc=description, total=total, initial=initial, leave=False)
        return
    started = last = time.monotonic()
    done = initial
    for done, item in enumerate(items, start=initial + 1):
        yield item
        now = time.monotonic()
        if now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            _log.info("%s: %d%s, %.0f s", description, done, f" of {total}" if total else "", now - started)
    _log.info("%s: done, %d in %.0f s", description, done, time.monotonic() - started)
