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
        file: name of the file or data set, for messages.
        columns: names of the table's columns, or of those of the first row.
        first_row: number of the row that holds ``columns``.
        table: whether every row has these columns.
        rows: an iterator over (number of the row, mapping from column to value); can be read once.
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


def rows_like_first(file: str, rows: Iterator[tuple[int, Row]]) -> Rows:
    """Rows of data without a header: the first row's columns stand for all. Raises: DataError if there is no row."""
    first = next(rows, None)
    if first is None:
        raise DataError("holds no records", fix="give one at least", file=file)
    return Rows(file, tuple(map(str, first[1])), first[0], False, chain([first], rows))


def read_text(path: Path) -> str:
    """The content of a UTF-8 file.

    Raises: DataError naming the line of a byte that is not UTF-8, or of a NUL byte.
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
