"""Rows of a CSV, TSV or Parquet file."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dptune.corpus.reading.fields import Row
from dptune.corpus.reading.rows import Rows, read_text
from dptune.corpus.reading.source import RecordSource
from dptune.errors import DataError


def table_rows(source: RecordSource, path: Path) -> Rows:
    """The rows of a CSV or TSV file below its header, which is row 1; all rows of a Parquet file, from row 1."""
    suffix = path.suffix.lower()
    return _parquet(path) if suffix in (".parquet", ".pq") else _csv(path, "\t" if suffix == ".tsv" else ",")


def _csv(path: Path, delimiter: str) -> Rows:
    content = read_text(path)
    by_line = delimiter == "\t" and _has_a_row_on_each_line(content)
    lines = _by_line(content) if by_line else _fields(path, content, delimiter)
    header = next(lines, (1, []))[1]
    for name in header:
        if not name.strip() or header.count(name) > 1:
            problem = "the column is repeated" if name.strip() else "a column has no name"
            raise DataError(problem, fix="name every column once in row 1", file=path, row=1, column=name)
    if not header:
        raise DataError("holds no header", fix="name the columns in row 1", file=path, row=1)
    first = next(lines, None)
    if first is None:
        raise DataError("holds only a header", fix="give one record at least", file=path, row=1)
    return Rows(str(path), tuple(header), 1, True, _with_column_names(path, header, chain([first], lines)))


def _with_column_names(
    path: Path, header: list[str], lines: Iterable[tuple[int, list[str]]]
) -> Iterator[tuple[int, Row]]:
    for number, cells in lines:
        if len(cells) != len(header):
            problem = f"{len(cells)} fields instead of {len(header)}"
            raise DataError(problem, fix="quote fields that hold the delimiter", file=path, row=number)
        yield number, dict(zip(header, cells, strict=True))


def _fields(path: Path, content: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with its number among all rows (not lines: a quoted field may hold some)."""
    number = 0
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
    while True:
        try:
            with _long_fields():
                cells = next(reader, None)
        except csv.Error as error:
            problem = f"not a row of a table ({error})"
            raise DataError(problem, fix="close every quote", file=path, row=number + 1) from None
        if cells is None:
            return
        number += 1
        if cells:
            yield number, cells


def _has_a_row_on_each_line(content: str) -> bool:
    """Whether every line of a table with tabs has the header's number of fields, whatever its quotes say. A field of
    several lines would leave lines with fewer. Not so of a single column, which any line fits.
    """
    tabs = {line.count("\t") for _, line in _lines(content)}
    return len(tabs) == 1 and 0 not in tabs


def _by_line(content: str) -> Iterator[tuple[int, list[str]]]:
    """Rows of a table with tabs, one on each line: a quote is a character of the text (as in GLUE's files), but where a
    field is quoted as a whole.
    """
    for number, line in _lines(content):
        yield number, [_unquoted(field) for field in line.split("\t")]


def _lines(content: str) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, each with its number."""
    return ((number, text) for number, line in enumerate(io.StringIO(content, None), 1) if (text := line.rstrip("\n")))


def _unquoted(field: str) -> str:
    inner = field[1:-1]
    whole = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if whole else field


@contextmanager
def _long_fields() -> Iterator[None]:
    """Context in which a field may be longer than the csv module's 128 KiB. The limit is shared by the process."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parquet(path: Path) -> Rows:
    try:
        file = pq.ParquetFile(path)
        columns = tuple(file.schema_arrow.names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"is no Parquet file ({type(error).__name__})", fix="write it again", file=path) from None
    if len(set(columns)) != len(columns):
        raise DataError("a column is repeated", fix="name every column once", file=path)
    if not file.metadata.num_rows:
        raise DataError("holds no records", fix="give one at least", file=path)
    return Rows(str(path), columns, 1, True, _parquet_rows(path, file))


def _parquet_rows(path: Path, file: Any) -> Iterator[tuple[int, Row]]:
    number = 0
    with file:
        batches = file.iter_batches()
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            except (OSError, ValueError, pa.ArrowException) as error:
                problem = f"is torn ({type(error).__name__})"
                raise DataError(problem, fix="write it again", file=path, row=number + 1) from None
            if batch is None:
                return
            for row in rows:
                number += 1
                yield number, row
