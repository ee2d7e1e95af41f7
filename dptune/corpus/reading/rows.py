"""Rows of a source, each with its number, and what all formats share in reading them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from dptune.corpus.reading.fields import Row
from dptune.errors import DataError


@dataclass(frozen=True)
class Rows:
    """The rows of one source. Private.

    Attributes:
        file: for messages.
        columns: of the first row, or of the table.
        first_row: where the columns stand.
        table: whether ``columns`` are those of every row.
        rows: (number, column to value), in order; read as they are asked for, once.
    """

    file: str
    columns: tuple[str, ...]
    first_row: int
    table: bool
    rows: Iterator[tuple[int, Row]] = field(repr=False)


def mappings(data: Iterable[Any], file: str) -> Iterator[tuple[int, Row]]:
    for number, row in enumerate(data, start=1):
        if not isinstance(row, Mapping):
            fix = "give mappings from column to value"
            raise DataError(f"the row is a {type(row).__name__}", fix=fix, file=file, row=number)
        yield number, row


def led_by_first(file: str, rows: Iterator[tuple[int, Row]]) -> Rows:
    """Rows whose columns are those of the first one."""
    first = next(rows, None)
    if first is None:
        raise DataError("holds no records", fix="give one at least", file=file)
    return Rows(file, tuple(map(str, first[1])), first[0], False, chain([first], rows))


def decoded(path: Path) -> str:
    """The file as text.

    Raises: DataError with the line of a byte that is not UTF-8, or of a NUL byte.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", fix="give a file that can", file=path) from None
    nul = content.find(b"\0")
    if nul >= 0:
        row = 1 + content.count(b"\n", 0, nul)
        fix = "save it as UTF-8; UTF-16 and binary files hold such bytes"
        raise DataError("holds a NUL byte", fix=fix, file=path, row=row)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = 1 + content.count(b"\n", 0, error.start)
        problem = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise DataError(problem, fix="save the file as UTF-8", file=path, row=row) from None
