"""Files that are whole or absent, and that only their owner can read.

Everything derived from private records is written through here: under a temporary name in the target's
directory, mode 0600, fsynced, then renamed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dptune.errors import DptuneError

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; on success it takes ``target``'s place, on error it goes.

    Raises: OSError as the file system does (disk full, read-only), naming ``target``, with nothing half-written left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with naming(target):
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, PRIVATE_FILE))
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, target)
            fsync_directory(target.parent)
        except BaseException as error:
            with suppress(OSError):
                temporary.unlink()
            if isinstance(error, OSError) and error.filename == str(temporary):
                error.filename = str(target)  # nobody knows the temporary one
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the disk name ``path``: of a failed write the system does not say where it was.

    Raises: OSError also in place of SafetensorError, which hides the system's error in a text.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it carries a sentence and no number: that would be hidden behind a name
            raise
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # not imported: nothing else here needs it
            raise
        raise OSError(errno.EIO, f"cannot be written ({error})", str(path)) from None


def write_text(target: Path, text: str) -> None:
    """Write ``text`` as UTF-8; whole or not at all, mode 0600."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys; whole or not at all, mode 0600."""
    write_text(target, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def jsonable(figures: Mapping[str, float]) -> dict[str, float | str]:
    """Infinities as text, which JSON has no number for."""
    return {key: value if math.isfinite(value) else str(value) for key, value in figures.items()}


def private_directory(path: Path) -> Path:
    """Make ``path`` (and parents) if absent, and close it to every other user (mode 0700)."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(PRIVATE_DIRECTORY)
    return path


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (made if absent); it ends with the process, however that ends.

    Raises: DptuneError at once if another process holds it, unless told to ``wait`` for that.
    """
    with open(path, "w", opener=lambda name, flags: os.open(name, flags, PRIVATE_FILE)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise DptuneError(f"{path.parent}: another process works on it. Fix: wait for it, or stop it.") from None
        yield


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable: a new file's name survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
