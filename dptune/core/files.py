"""Files that are whole or absent, and that only their owner can read.

Everything derived from private records is written through here: under a temporary name in the target's
directory, mode 0600, fsynced, then renamed. What was written is read back through ``read_json``, which names a file
that was cut off or edited since.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar, overload

from dptune.core.errors import DptuneError

_log = logging.getLogger(__name__)
T = TypeVar("T")

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700
#: Seconds since 1970 that stand for every time of a file whose own would tell how long a run took: 2 January 1980, for
#: zip files know none before 1980 in any time zone.
NO_TIME = 315_619_200
_PARTIAL = ".partial"
#: Seconds for which a lock is waited for without a word, and between two looks at it.
_SILENT, _LOOK = 2.0, 0.1
#: What a path is that holds no bytes of its own, which a reader would wait for, or wait on without end.
_NO_FILES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
#: What JSON calls the types that its reader makes.
_TYPES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}


class DamagedFileError(DptuneError, ValueError):
    """A file of dptune's own that does not hold what dptune wrote there."""


_LFS = b"version https://git-lfs"
#: What Git leaves of a large file until ``git lfs pull`` fetches it.
POINTER = "a pointer of Git LFS"


def not_a_file(path: Path) -> str:
    """What a path is that is no file: "a FIFO", for example; empty for a file, and where there is nothing."""
    try:
        return _NO_FILES.get(stat.S_IFMT(path.stat().st_mode), "")
    except OSError:
        return ""


def why_unreadable(path: Path) -> str:
    """Why a file that should be there cannot be read, such as "is a FIFO"; empty for a file that can.

    Also for one of no bytes, and for a pointer that Git LFS left in its place.
    """
    if not path.is_file():
        other = not_a_file(path)
        return (
            f"is {other}" if other else f"is {'a link to a file that is not there' if path.is_symlink() else 'missing'}"
        )
    with path.open("rb") as opened:
        head = opened.read(len(_LFS))
    if not head:
        return "is empty"
    return f"is {POINTER}, not the file itself" if head == _LFS else ""


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; on success it takes ``target``'s place, on error it goes.

    What killed processes left of earlier tries goes first.

    Raises: OSError as the file system does (disk full, read-only), naming ``target``, with nothing half-written left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    with naming(target):
        try:
            # Where others may write, a file or link that waits under this name would get the content.
            temporary.unlink(missing_ok=True)
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, PRIVATE_FILE))
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
def replacing_folder(target: Path) -> Iterator[Path]:
    """The same for a folder, which takes the place of one that is there; it need not be made by the caller.

    Killed at any moment, ``target`` is what it was, absent, or the new one; never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(target)
    with naming(target):
        try:
            yield private_directory(temporary)
            put_folder(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def put_folder(source: Path, target: Path) -> None:
    """Give a whole folder its final name: first all of it is durable, then one rename. A folder of that name goes."""
    for folder, _, names in os.walk(source):
        for name in names:
            fsync_directory(Path(folder, name))
        fsync_directory(Path(folder))
    if target.exists():
        old = _temporary(target.with_name(f"{target.name}.old"))
        target.rename(old)  # a removal takes time, and a kill would leave a half
        source.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        source.rename(target)
    fsync_directory(target.parent)


def _temporary(target: Path) -> Path:
    """This process's temporary name for ``target``; those of this machine's processes that have died are removed."""
    start = f".{target.name}.{gethostname()}-"
    for path in target.parent.glob(f"{glob.escape(start)}*{_PARTIAL}"):
        process = path.name.removeprefix(start).removesuffix(_PARTIAL)
        if process.isdecimal() and not _is_alive(int(process)):
            _remove(path)
    return target.with_name(f"{start}{os.getpid()}{_PARTIAL}")


def discard_partial(folder: Path) -> None:
    """Remove all that lies in a folder under temporary names. No other process may write there."""
    for path in folder.glob(f".*-*{_PARTIAL}"):
        _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the disk name ``path``: of a failed write the system does not say where it was.

    Raises: OSError also in place of the errors of safetensors and tokenizers, which hide the system's in a text.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it carries a sentence and no number: that would be hidden behind a name
            raise
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        # Its type is not imported: nothing else here needs it. That of tokenizers is a bare Exception.
        if type(error).__name__ != "SafetensorError" and "(os error " not in str(error):
            raise
        raise OSError(errno.EIO, f"cannot be written ({error})", str(path)) from None


def write_text(target: Path, text: str) -> None:
    """Write ``text`` as UTF-8; whole or not at all, mode 0600."""
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys; whole or not at all, mode 0600."""
    write_text(target, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


@overload
def read_json(path: Path, *, fix: str = ...) -> dict[str, Any]: ...
@overload
def read_json(path: Path, make: Callable[[Any], T], *, kind: type[Any] = ..., fix: str = ...) -> T: ...
def read_json(path: Path, make: Any = None, *, kind: type[Any] = dict, fix: str = "restore a copy of it") -> Any:
    """Read a JSON file that dptune wrote.

    Args:
        make: makes what is needed of the content; None: the content itself, whose missing keys name the file too.
        kind: type of the whole content.
        fix: what to do about a damaged file.

    Raises: DamagedFileError, one sentence, for a file that is missing, cut off at any byte, empty, of another type, or
        that ``make`` cannot use.
    """

    damage = partial(_damage, path, fix)
    if other := not_a_file(path):
        raise damage(f"is {other}, not a file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damage("is missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})") from None
    if not content.strip():
        raise damage("is empty: the write was cut off, or somebody emptied it")
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        raise damage("is not complete JSON: the write was cut off, or it was edited") from None
    if not isinstance(found, kind):
        raise damage(f"holds {_TYPES.get(type(found), 'a number')} where {_TYPES[kind]} belongs")
    if make is None:
        stored = _Stored(found)
        stored.path, stored.fix = path, fix
        return stored
    try:
        return make(found)
    except DptuneError:
        raise
    except KeyError as error:
        raise damage(f"lacks {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise damage(f"does not hold what was written there ({str(error).splitlines()[0]})") from None


def _damage(path: Path, fix: str, problem: str) -> DamagedFileError:
    return DamagedFileError(f"{path}: {problem}. Fix: {fix}.")


class _LacksKeyError(DamagedFileError, KeyError):
    """What is raised for a key that a file lacks: a KeyError too, for those who ask whether there is one."""

    __str__ = Exception.__str__


class _Stored(dict[str, Any]):
    """The content of a file, which names it where a key is missing."""

    path: Path
    fix: str

    def __missing__(self, key: str) -> Any:
        raise _LacksKeyError(str(_damage(self.path, self.fix, f"lacks {key!r}")))


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


def sha256_once(path: Path) -> str:
    """The same of a large file, which is read again only if the file system says that it is another or has changed."""
    state = path.stat()
    return _sha256_of(path.resolve(), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@lru_cache(maxsize=4096)
def _sha256_of(path: Path, *state: int) -> str:
    return sha256(path)


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (made if absent); it ends with the process, however that ends.

    Args:
        wait: whether to wait while another process holds it. After two seconds a warning says for whom.

    Raises: DptuneError at once if another process holds it, unless told to ``wait``; or if the path is no file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, PRIVATE_FILE)  # a FIFO would wait for a reader
    try:
        if other := not_a_file(path):
            raise DptuneError(f"{path}: is {other}, and a lock belongs there. Fix: move it away.")
        begun = time.monotonic()
        said = False
        while not lock_now(descriptor):
            if not wait:
                problem = f"another process works on it{holder_of(descriptor)}"
                raise DptuneError(f"{path.parent}: {problem}. Fix: wait for it, or stop it.") from None
            if not said and time.monotonic() - begun >= _SILENT:
                said = True
                _log.warning("%s is locked by another process%s: waiting for it", path, holder_of(descriptor))
            time.sleep(_LOOK)
        yield
    finally:
        os.close(descriptor)


def lock_now(descriptor: int) -> bool:
    """Take the exclusive lock of an open file, if no other process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_of(descriptor: int) -> str:
    """The process that holds a file's lock, as the end of a clause; empty where the system does not say."""
    number = f":{os.fstat(descriptor).st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()
            if "->" not in words and len(words) > 5 and words[5].endswith(number) and words[4] != "0":
                return f" (process {words[4]})"
    return ""


def forget_times(path: Path) -> None:
    """Stamp a file, or a folder and all in it, with ``NO_TIME``. The file system keeps the time of this change."""
    for one in (*path.rglob("*"), path):
        os.utime(one, (NO_TIME, NO_TIME), follow_symlinks=False)


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable: a new file's name survives a power cut. Of a file, its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
