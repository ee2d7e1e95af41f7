"""Rows of a source, each with its number, and what all formats share in reading them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from dptune.core.errors import DataError
from dptune.core.streams import read_input
from dptune.records.reading.fields import TOO_FAR, Row, Unreadable, scalar, way_of
from dptune.records.reading.formats import PACKED, refuse_binary
from dptune.records.reading.source import RecordSource


@dataclass(frozen=True)
class Rows:
    """The rows of one source. Private.

    Attributes:
        file: name of the file or data set, for messages.
        columns: names of the table's columns, or of those of the first row.
        first_row: number of the row that holds ``columns``.
        table: whether every row has these columns.
        rows: an iterator over (number of the row, mapping from column to value); can be read once.
        open_end: whether the file's last line has no line end, as where a file is cut off.
    """

    file: str
    columns: tuple[str, ...]
    first_row: int
    table: bool
    rows: Iterator[tuple[int, Row]] = field(repr=False)
    open_end: bool = False


def mappings(data: Iterable[Any], file: str) -> Iterator[tuple[int, Row]]:
    rows, number = iter(data), 0
    while True:
        number += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except (OverflowError, UnicodeDecodeError) as error:  # how Arrow gives a row of the ``datasets`` library
            far = isinstance(error, OverflowError)
            problem = TOO_FAR.problem if far else "holds text that is not UTF-8"
            raise DataError(problem, fix="correct it, or leave the column out", file=file, row=number) from None
        if not isinstance(row, Mapping):
            fix = "give mappings from column to value" + (", such as {'text': ...}" if isinstance(row, str) else "")
            raise DataError(f"the row is a {type(row).__name__}", fix=fix, file=file, row=number)
        yield number, row


def rows_of_batch(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch of Arrow; a value that Python cannot hold is ``Unreadable``."""
    try:
        return batch.to_pylist()
    except (OverflowError, ValueError):
        columns = [[_python(value) for value in column] for column in batch.columns]
        return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _python(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return Unreadable("holds text that is not UTF-8", "write it as UTF-8")
    except (OverflowError, ValueError):
        return TOO_FAR


def rows_like_first(file: str, rows: Iterator[tuple[int, Row]]) -> Rows:
    """Rows of data without a header: the first row's columns stand for all. Raises: DataError if there is no row."""
    first = next(rows, None)
    if first is None:
        raise DataError("holds no records", fix="give one at least", file=file)
    return Rows(file, tuple(map(str, first[1])), first[0], False, chain([first], rows))


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if it ends in ``PACKED``. Raises: DataError if it cannot be read."""
    try:
        content = read_input(path)
    except OSError as error:
        raise DataError(
            f"cannot be read ({error.strerror or error})", fix="give a file that you can read", file=path
        ) from None
    if path.suffix.lower() != PACKED:
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        problem = f"is not a complete gzip file ({type(error).__name__})"
        raise DataError(problem, fix=f"pack it again, or give it unpacked without {PACKED}", file=path) from None


def read_text(path: Path) -> str:
    """The content of a UTF-8 file.

    Raises: DataError naming the line of a byte that is not UTF-8, or of a NUL byte.
    """
    content = read_bytes(path)
    refuse_binary(path, content)
    nul = content.find(b"\0")
    if nul >= 0:
        row = 1 + content.count(b"\n", 0, nul)
        fix = "save it as UTF-8 (UTF-16 and binary files hold such bytes), or export it again if it is damaged"
        raise DataError("holds a NUL byte", fix=fix, file=path, row=row)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = 1 + content.count(b"\n", 0, error.start)
        problem = f"byte 0x{content[error.start]:02x} is not UTF-8"
        raise DataError(problem, fix="save the file as UTF-8", file=path, row=row) from None


# Rejects rows that have no usable text.


def checked(source: RecordSource, found: Rows) -> Rows:
    """The same rows, which raise DataError at a row whose columns are all empty; at once, without any column for texts.

    A table's missing value is written "unknown" beside others; where all are missing, only names of columns would be
    learned.
    """
    if way_of(source, found.file, found.columns, found.first_row, found.table) != "columns":
        return found
    columns = [name for name in found.columns if name not in (source.unit, source.id, source.label)]
    if not columns:
        fix = "give a column of texts"
        raise DataError("has no column to make a text from", fix=fix, file=found.file, row=found.first_row)
    return replace(found, rows=_telling(found, columns))


def _telling(found: Rows, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    for number, row in found.rows:

        def refuse(column: str, problem: str, fix: str, number: int = number) -> DataError:
            return DataError(problem, fix=fix, file=found.file, row=number, column=column)

        if not any(scalar(row, name, refuse) for name in columns):
            named = f"column {columns[0]!r} is" if len(columns) == 1 else f"all of {', '.join(map(repr, columns))} are"
            fix = "fill one in, or remove the record"
            raise DataError(f"{named} empty", fix=fix, file=found.file, row=number)
        yield number, row
