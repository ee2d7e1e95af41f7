"""The file of a register: one JSON object a line, each with its number and the SHA-256 of all lines up to its own.

Reading names a line that was edited, and lines that were removed, repeated or put in another order. The file alone
cannot show that lines were cut off at its end, or that all of it was replaced: ``booking`` compares it with the
ledgers that lie beside it. Lines of an earlier version have no number; their checksums hold them together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import PRIVATE_FILE, fsync_directory, not_a_file
from dptune.privacy.ledger_file import GENESIS, LedgerError, encode, seal

#: Key of a line's number.
NUMBER = "number"


class DamagedRegisterError(LedgerError):
    """A register that cannot be trusted.

    Attributes:
        problem: the file, the line, and what is wrong with it.
    """

    def __init__(self, problem: str, shown: str = "") -> None:
        fix = "restore a copy of it; if you have none, move it away, and add by hand what was spent in other folders"
        super().__init__(f"{problem}{shown}. Fix: {fix}.")
        self.problem = problem


def whole_lines(path: Path) -> list[bytes]:
    """All whole lines; the last one of a write that was cut off was never acknowledged.

    A last line that lacks its newline alone is whole: editors strip it. If nobody was told of it, it harms nobody.

    Raises: ConfigError if others can read the file: with its key they could test a guess of all records.
    """
    if not path.exists():
        return []
    if other := not_a_file(path):
        raise ConfigError(str(path), f"is {other}, not a file", fix="give the file of a register, or a new one")
    if path.stat().st_mode & 0o077:
        raise ConfigError(str(path), "can be read by others", fix=f"check who has read it, then run `chmod 600 {path}`")
    *lines, last = path.read_bytes().split(b"\n")
    if _is_json(last):
        lines.append(last)
    return [line + b"\n" for line in lines]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of all lines, in order, without checksums; the first is the register's own.

    Raises: DamagedRegisterError naming the first line that is not what was written there.
    """
    found: list[dict[str, Any]] = []
    chain = GENESIS
    for position, raw in enumerate(whole_lines(path), start=1):
        try:
            record = json.loads(raw)
            stated = record.pop("chain")
            line, chain = seal(encode(record), chain)
            numbered = record.get(NUMBER, position if not any(NUMBER in one for one in found[-1:]) else None)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise DamagedRegisterError(f"{path}, line {position}: was edited") from None
        if numbered != position:
            raise DamagedRegisterError(f"{path}, line {position}: {_misplaced(numbered, position)}")
        if stated != chain or raw != line or (position == 1) != (record.get("kind") == "register"):
            raise DamagedRegisterError(f"{path}, line {position}: was edited")
        found.append(record)
    return found


def unnumbered(path: Path) -> int:
    """Number of lines that an earlier version wrote, without numbers."""
    return sum(NUMBER not in record for record in read_lines(path))


def _misplaced(numbered: Any, position: int) -> str:
    """What is wrong with a line that states another number than its place has."""
    if type(numbered) is not int:
        return "has no number, and the line above it has one"
    if (missing := numbered - position) > 0:
        lines = "a line above it is" if missing == 1 else f"{missing} lines above it are"
        return f"says that it is line {numbered}: {lines} missing"
    return f"says that it is line {numbered}: it is repeated, or out of order"


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line, durable when this returns. Its caller holds the register's lock.

    Raises: LedgerError if the disk refuses it; nothing is charged then.
    """
    lines = whole_lines(path)
    chain = str(json.loads(lines[-1])["chain"]) if lines else GENESIS
    line, _ = seal(encode({**record, NUMBER: len(lines) + 1}), chain)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE_FILE)
        try:
            whole = b"".join(lines)
            kept = min(len(whole), os.fstat(descriptor).st_size)
            os.ftruncate(descriptor, kept)  # cuts off a line that nobody was told of
            os.lseek(descriptor, 0, os.SEEK_END)
            line = whole[kept:] + line  # a newline that was lost
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_directory(path.resolve().parent)
    except OSError as error:
        problem = f"{path}: cannot be written ({error.strerror})"
        raise LedgerError(f"{problem}. Fix: free space, or make it writable; nothing was charged.") from None


def _is_json(line: bytes) -> bool:
    """Whether a line is whole JSON, which no shorter start of an entry's line is."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
