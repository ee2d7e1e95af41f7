"""Parts of work that processes share: each takes the next item that is not made and that no other process makes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from dptune.core.errors import DptuneError
from dptune.core.files import locked

T = TypeVar("T")
_log = logging.getLogger(__name__)


def make_part(
    what: str,
    items: Sequence[T],
    part: int,
    parts: int,
    *,
    lock: Callable[[T], Path],
    is_made: Callable[[T], bool],
    make: Callable[[T], None],
) -> None:
    """Make every item that is not made and that no other process makes, from one at the part's share on.

    A process that loads a library for seconds thus makes several items, and a kill costs the one under way.

    Args:
        what: what an item is, for the log.
        part: number of this process, from 0, of ``parts``.
        lock: the file that is locked while an item is made.

    Raises: the first error of an item, after all others have been tried.
    """
    begin = part * len(items) // parts
    errors = []
    for item in [*items[begin:], *items[:begin]]:
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(lock(item)))
            except DptuneError:  # another process', and no fault
                continue
            if is_made(item):
                continue
            try:
                make(item)
            except Exception as error:  # the others must still be made
                _log.error("%s %s: %s", what, item, error, exc_info=not isinstance(error, DptuneError | OSError))
                errors.append(error)
    if errors:
        raise errors[0]
