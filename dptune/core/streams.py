"""A user's input file, read whole; or a stream in its place, such as ``<(zcat letters.jsonl.gz)`` or ``/dev/stdin``."""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
from pathlib import Path

from dptune.core.files import not_a_file

_log = logging.getLogger(__name__)
#: Seconds after which it is said that nobody writes into a stream, and most bytes of one read.
_SILENT, _CHUNK = 2.0, 1 << 20


def read_input(path: Path) -> bytes:
    """The content of a file, or of a FIFO or terminal up to its end. A stream can be read once.

    A warning says that a stream is waited for, if nothing comes for two seconds.

    Raises: OSError as the file system does; also for a socket, a device or a folder, with that as its reason.
    """
    if not (other := not_a_file(path)):
        return path.read_bytes()
    if other in ("a socket", "a folder"):
        raise OSError(errno.EINVAL, f"it is {other}", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else opening would wait for a writer, without a word
    try:
        if not (stat.S_ISFIFO(os.fstat(descriptor).st_mode) or os.isatty(descriptor)):
            raise OSError(errno.EINVAL, f"it is {other}", str(path))  # such as /dev/zero, which has no end
        parts: list[bytes] = []
        silent = True
        while True:
            if not select.select([descriptor], [], [], _SILENT if silent else None)[0]:
                _log.warning("%s is %s: waiting for what its writer sends", path, other)
                silent = False
                continue
            try:
                part = os.read(descriptor, _CHUNK)
            except BlockingIOError:  # another process took it
                continue
            if not part:
                return b"".join(parts)
            parts.append(part)
    finally:
        os.close(descriptor)
