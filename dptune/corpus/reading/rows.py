"""Rows of a file, of the ``datasets`` library or of Python, each with its number: located errors, whatever is wrong."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dptune.corpus.reading.fields import Row
from dptune.corpus.reading.source import Data, RecordSource, is_hub_name
from dptune.errors import ConfigError, DataError

_PYTHON = "the records given from Python"
#: Lines of one paragraph, on average, from which a file may as well hold one record a line.
_LINES_OF_A_PARAGRAPH = 20
#: Lines that are looked at to tell text from JSON, how many there must be, and the fields that a table has at least.
_LOOKED_AT, _ENOUGH, _FIELDS = 50, 5, 3


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


def rows_of(source: RecordSource, data: Data) -> Rows:
    """Open ``data``.

    Raises: ConfigError for what the source cannot mean; DataError for what cannot be read, now or at the row.
    """
    if not isinstance(data, str | Path):
        return _given(data)
    if is_hub_name(source, data):
        return _hub(source, str(data))
    path = Path(data)
    if not path.exists():
        fix = "check the path; a data set of the hub needs data.revision"
        raise DataError("there is no such file", fix=fix, file=path)
    readers = {"text": _text, "jsonl": _jsonl, "table": _table, "datasets": _saved}
    return readers[source.format_of(path)](source, path)


# --- from Python and from the datasets library ---------------------------------------------------------------


def _given(data: Iterable[Mapping[str, Any]]) -> Rows:
    columns = getattr(data, "column_names", None)  # of a datasets.Dataset, which need not be installed
    if isinstance(columns, Mapping):
        fix = f"give one of its parts, such as data[{next(iter(columns), 'train')!r}]"
        raise DataError("is a DatasetDict", fix=fix, file=_PYTHON)
    rows = _mappings(data, _PYTHON)
    if isinstance(columns, list):
        return Rows(_PYTHON, tuple(columns), 1, True, rows)
    return _led_by_first(_PYTHON, rows)


def _mappings(data: Iterable[Any], file: str) -> Iterator[tuple[int, Row]]:
    for number, row in enumerate(data, start=1):
        if not isinstance(row, Mapping):
            fix = "give mappings from column to value"
            raise DataError(f"the row is a {type(row).__name__}", fix=fix, file=file, row=number)
        yield number, row


def _led_by_first(file: str, rows: Iterator[tuple[int, Row]]) -> Rows:
    """Rows whose columns are those of the first one."""
    first = next(rows, None)
    if first is None:
        raise DataError("holds no records", fix="give one at least", file=file)
    return Rows(file, tuple(map(str, first[1])), first[0], False, chain([first], rows))


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        fix = "pip install 'dptune[datasets]', or give the records as JSONL or Parquet"
        raise ConfigError("data.format", "the datasets library is not installed", fix=fix) from None
    return datasets


def _saved(source: RecordSource, path: Path) -> Rows:
    """What ``save_to_disk`` of the datasets library left in a folder."""
    try:
        found = _library().load_from_disk(str(path))
        if isinstance(getattr(found, "column_names", None), Mapping):
            found = found[source.part]
    except KeyError:
        raise DataError(f"has no part {source.part!r}", fix="name another data.part", file=path) from None
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        problem = f"is no folder that the datasets library saved ({type(error).__name__})"
        raise DataError(problem, fix="save it again with save_to_disk", file=path) from None
    return _of_library(found, str(path))


def _hub(source: RecordSource, name: str) -> Rows:
    try:
        found = _library().load_dataset(name, revision=source.revision, split=source.part)
    except ConfigError:
        raise
    except Exception as error:  # whatever network, hub and library raise
        problem = f"cannot be loaded ({type(error).__name__})"
        raise DataError(problem, fix="check name, revision, data.part and network", file=name) from error
    return _of_library(found, name)


def _of_library(found: Any, file: str) -> Rows:
    if not len(found):
        raise DataError("holds no records", fix="give one at least", file=file)
    return Rows(file, tuple(found.column_names), 1, True, _mappings(found, file))


# --- files ---------------------------------------------------------------------------------------------------


def _text(source: RecordSource, path: Path) -> Rows:
    content = _decoded(path)
    lines = content.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    _refuse_other_formats(path, lines, stated=source.records_are is not None)
    by_paragraph = any(not line.strip() for line in _inner(lines))
    if source.records_are is None and by_paragraph:
        _refuse_swallowed(path, lines)
    if source.records_are == "lines" or (source.records_are is None and not by_paragraph):
        found = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    else:
        found = list(_paragraphs(lines))
    if not found:
        raise DataError("holds no records", fix="give one at least", file=path)
    # The column is called what the source calls it, so that text needs no case of its own.
    column = source.text or "text"
    return Rows(str(path), (column,), 1, False, ((number, {column: text}) for number, text in found))


def _inner(lines: Sequence[str]) -> Sequence[str]:
    """The lines without the empty ones at both ends."""
    told = [number for number, line in enumerate(lines) if line.strip()]
    return lines[told[0] : told[-1] + 1] if told else []


def _paragraphs(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Each paragraph with the number of its first line; white space becomes single spaces."""
    start, words = 0, list[str]()
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip():
            start = start if words else number
            words += line.split()
        elif words:
            yield start, " ".join(words)
            words = []


def _refuse_swallowed(path: Path, lines: Sequence[str]) -> None:
    """One empty line in a file of one record a line would make two records of it, each of half the people."""
    paragraphs, filled = len(list(_paragraphs(lines))), sum(bool(line.strip()) for line in lines)
    if filled > _LINES_OF_A_PARAGRAPH * paragraphs:
        row = 1 + next(number for number, line in enumerate(lines) if not line.strip())
        problem = f"has {filled} lines and {paragraphs} paragraphs, so an empty line may have joined records"
        raise DataError(problem, fix="say data.records_are: lines, or paragraphs", file=path, row=row)


def _refuse_other_formats(path: Path, every: Sequence[str], *, stated: bool) -> None:
    lines = [line for line in every[:_LOOKED_AT] if line.strip()]
    if len(lines) < _ENOUGH:
        return
    if all(re.fullmatch(r"\s*\{.*\}\s*", line) for line in lines):
        raise DataError("looks like JSONL and is read as text", fix="use data.format: jsonl", file=path, row=1)
    for delimiter in "" if stated else ",\t":
        counts = {line.count(delimiter) + 1 for line in lines}
        if len(counts) == 1 and counts.pop() >= _FIELDS:
            fix = "use data.format: table; if it is text, say data.records_are: lines or paragraphs"
            raise DataError("looks like a table and is read as text", fix=fix, file=path, row=1)


def _jsonl(source: RecordSource, path: Path) -> Rows:
    return _led_by_first(str(path), _objects(path, _decoded(path)))


def _objects(path: Path, content: str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            problem = f"is no JSON ({error})" if isinstance(error, _RepeatedError) else "is no JSON"
            raise DataError(problem, fix="write one object on every line", file=path, row=number) from None
        if not isinstance(row, dict):
            fix = 'write one object on every line, such as {"text": ...}'
            raise DataError("is JSON, and no object", fix=fix, file=path, row=number)
        yield number, row


class _RepeatedError(ValueError):
    """A name that an object gives twice: one of the two values would be lost without a word."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise _RepeatedError("a name comes twice in one object")
    return row


def _table(source: RecordSource, path: Path) -> Rows:
    suffix = path.suffix.lower()
    return _parquet(path) if suffix in (".parquet", ".pq") else _csv(path, "\t" if suffix == ".tsv" else ",")


def _csv(path: Path, delimiter: str) -> Rows:
    lines = _fields(path, _decoded(path), delimiter)
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
    return Rows(str(path), tuple(header), 1, True, _named(path, header, chain([first], lines)))


def _named(path: Path, header: list[str], lines: Iterable[tuple[int, list[str]]]) -> Iterator[tuple[int, Row]]:
    for number, cells in lines:
        if len(cells) != len(header):
            problem = f"{len(cells)} fields instead of {len(header)}"
            raise DataError(problem, fix="quote fields that hold the delimiter", file=path, row=number)
        yield number, dict(zip(header, cells, strict=True))


def _fields(path: Path, content: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with its number among all rows: a quoted field may hold line ends."""
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


@contextmanager
def _long_fields() -> Iterator[None]:
    """Within, fields may be longer than the 128 KiB that the csv module allows; the limit is the whole process's."""
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


def _decoded(path: Path) -> str:
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
