"""Rows of a CSV, TSV or Parquet file."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dptune.core.errors import DataError
from dptune.records.reading.fields import Row
from dptune.records.reading.formats import PACKED, ending_of, refuse_other_text
from dptune.records.reading.rows import Rows, read_bytes, read_text, rows_of_batch
from dptune.records.reading.source import RecordSource

#: What may separate the columns of a table, in words.
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
#: The number of rows, and of characters, that tell what a file is.
_LOOKED_AT, _BEGINNING = 50, 100_000
#: A field that is a number, a day or an e-mail address, and no name of a column.
_VALUE = re.compile(r"\s*(?:[-+]?\d[\d.,]*%?|\d{1,4}([-/.])\d\d?\1\d{1,4}.*|\S+@\S+\.\w+)\s*")


def table_rows(source: RecordSource, path: Path) -> Rows:
    """The rows of a CSV or TSV file below its header, which is row 1; all rows of a Parquet file, from row 1."""
    return _parquet(path) if ending_of(path) in (".parquet", ".pq") else _csv(source, path)


def _csv(source: RecordSource, path: Path) -> Rows:
    content = read_text(path)
    refuse_other_text(path, content[:_BEGINNING].splitlines(), "a table")
    delimiter = _delimiter(path, content)
    by_line = delimiter == "\t" and _has_a_row_on_each_line(content)
    lines = _by_line(content) if by_line else _fields(path, content, delimiter)
    header = next(lines, (1, []))[1]
    named = source.text or source.prompt or source.messages or source.template  # its absence is said by name
    if len(header) == 1 and not named and header[0] not in (source.label, source.unit, "text", "messages"):
        problem = f"is read as a table of one column, {header[0][:40]!r}"
        fix = "separate columns by commas, semicolons, tabs or bars; or name the column as data.text, if it is all"
        if any(mark in header[0] for mark in _DELIMITERS):
            fix = "remove the quotes around whole rows; or name the column as data.text, if it is all"
        raise DataError(problem, fix=fix, file=path, row=1)
    for name in header:
        if not name.strip() or header.count(name) > 1:
            problem = "the column is repeated" if name.strip() else "a column has no name"
            raise DataError(problem, fix="name every column once in row 1", file=path, row=1, column=name)
    if not header:
        raise DataError("holds no header", fix="name the columns in row 1", file=path, row=1)
    first = list(islice(lines, _LOOKED_AT))
    if not first:
        raise DataError("holds only a header", fix="give one record at least", file=path, row=1)
    if not {source.unit, source.id, source.label} & {*header} and not named:
        _refuse_a_record_as_header(path, header, [cells for _, cells in first if len(cells) == len(header)])
    rows = _with_column_names(path, header, chain(first, lines))
    return Rows(str(path), tuple(header), 1, True, rows, open_end=not content.endswith(("\n", "\r")))


def _refuse_a_record_as_header(path: Path, header: list[str], rows: list[list[str]]) -> None:
    """Refuse a header that is a record: a value, such as a number, over values, and no name over any. Years and numbers
    of columns are names.
    """
    valued = [place for place in range(len(header)) if all(_VALUE.fullmatch(cells[place]) for cells in rows)]
    over = [header[place] for place in valued]
    numbered = all(one.isdecimal() for one in header) and header == [
        str(int(header[0]) + n) for n in range(len(header))
    ]
    years = all(re.fullmatch(r"(?:19|20)\d\d", one) for one in over)
    others = [cells for cells in rows if sorted(map(_plain, cells)) != sorted(map(_plain, header))]
    again = [one for place, one in enumerate(header) if any(cells[place] == one for cells in others)]
    if again:
        problem = f"looks like a record and is read as names of columns: {again[0][:40]!r} is also a value below"
        raise DataError(problem, fix="name the columns in row 1", file=path, row=1)
    if not years and not numbered and all(map(_VALUE.fullmatch, over)):
        problem = f"looks like a record and is read as names of columns, {over[0][:40]!r} over such values"
        raise DataError(problem, fix="name the columns in row 1", file=path, row=1)


def _delimiter(path: Path, content: str) -> str:
    """What separates the columns: a comma or a tab, by the file's ending, unless the header holds none and another.

    Raises: DataError for a header that several could separate.
    """
    first = re.search(r".*\S.*", content)  # the first line that is not empty
    header = first[0] if first else ""
    if re.fullmatch(r"\s*\"?sep=.\"?\s*", header, re.IGNORECASE):
        problem = "begins with Excel's line sep=, which is not a header"
        raise DataError(problem, fix="remove the line", file=path, row=1)
    usual = "\t" if ending_of(path) == ".tsv" else ","
    names = re.sub('"[^"]*"', "", header)
    if usual in names:
        others = [mark for mark in _DELIMITERS if mark != usual and names.count(mark) >= names.count(usual)]
    elif len(others := [mark for mark in _DELIMITERS if mark in names]) == 1:
        return others[0]
    if others:
        shown = " or ".join(_DELIMITERS[mark] for mark in dict.fromkeys((usual, *others)) if mark in names)
        problem = f"its columns may be separated by {shown}"
        raise DataError(problem, fix="quote the names of columns, or rename them", file=path, row=1)
    return usual


def _with_column_names(
    path: Path, header: list[str], lines: Iterable[tuple[int, list[str]]]
) -> Iterator[tuple[int, Row]]:
    names = sorted(map(_plain, header))
    for number, cells in lines:
        if cells and _plain(cells[0]) in names and sorted(map(_plain, cells)) == names:
            problem = "the row repeats the header, as if two files were joined"
            fix = "remove the row, and bring the rows below it to the order of the first header"
            raise DataError(problem, fix=fix, file=path, row=number)
        if len(cells) != len(header):
            problem = f"{len(cells)} fields instead of {len(header)}"
            fix = 'quote fields that hold the delimiter by "'
            if len(cells) > len(header) and not any(cells[len(header) :]):
                fix = "remove the delimiters at the row's end, or name a column for them in row 1"
            if len(cells) < len(header):
                fix = (
                    "fill in the row's missing fields; if it is the last row, the file may be cut off: export it again"
                )
            if len(cells) == 1 and any(mark in cells[0] for mark in _DELIMITERS):
                fix = "remove the quotes around the whole row, separate it as row 1 is, or fill in its missing fields"
            raise DataError(problem, fix=fix, file=path, row=number)
        yield number, dict(zip(header, cells, strict=True))


def _plain(name: str) -> str:
    """A column's name without its case, a byte-order mark, and what stands between its words."""
    return re.sub(r"[\s_\ufeff-]", "", name).casefold()


def _fields(path: Path, content: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not empty, each with its number among all rows (not lines: a quoted field may hold some)."""
    number, end = 0, 0
    lines = list(io.StringIO(content, newline=""))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    whole, joined = list[list[str]](), dict[int, list[list[str]]]()
    while True:
        try:
            with _long_fields():
                cells = next(reader, None)
        except csv.Error as error:
            problem = f"not a row of a table ({error})"
            fix = (
                'close every quote, and double those within a field ("", not \\"); export a file that is cut off again'
            )
            raise DataError(problem, fix=fix, file=path, row=number + 1) from None
        if cells is None:
            break
        number += 1
        if delimiter == "\t" and any(_holds_a_row(cell, len(cells)) for cell in cells):
            raise _joined(path, number)
        # A row of several lines, each of which has its number of fields, is judged by the other rows, at the end.
        split = [line.replace('"', "").strip().split(delimiter) for line in lines[end : reader.line_num]]
        end, told = reader.line_num, [one for one in split if one != [""]]
        if number > 1 and told:
            if all(len(one) == len(cells) for one in told[1:]) and told[1:]:
                joined[number] = told[1:]
            whole += [told[0]] if len(told[0]) == len(cells) else []
        if cells:
            yield number, cells
    row = next((number for number, told in joined.items() if _look_like_rows(told, whole)), None)
    if row is not None:
        raise _joined(path, row)


def _joined(path: Path, row: int) -> DataError:
    problem = "a field in quotes holds whole rows, as where two quotes stand in texts and not around them"
    fix = "double them inside a quoted field, or remove them; or give JSONL, if texts hold such lines"
    return DataError(problem, fix=fix, file=path, row=row)


def _look_like_rows(told: list[list[str]], whole: list[list[str]]) -> bool:
    """Whether lines within a field, split by the delimiter, are rows as others of the table are.

    Texts hold delimiters and line ends too. So a column of codes (ids, labels, dates) decides: no other row has a space
    there, and each line's field is built of letters and digits as that of another row. Without one nothing is said.
    """
    codes = [place for place in range(len(told[0])) if not any(" " in row[place].strip() for row in whole)]
    built = {place: {_built(row[place]) for row in whole} for place in codes}
    return bool(codes) and all(_built(line[place]) in built[place] for line in told for place in codes)


def _built(field: str) -> str:
    """A field with each run of letters as a, and each that holds digits as 0."""
    return re.sub(r"\w+", lambda run: "0" if re.search(r"\d", run[0]) else "a", field.strip())


def _holds_a_row(field: str, columns: int) -> bool:
    """Whether a line within a field has as many tabs as a row."""
    return columns > 1 and any(line.count("\t") == columns - 1 for line in field.split("\n")[1:-1])


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
        whole = path.is_file() and path.suffix.lower() != PACKED
        file = pq.ParquetFile(path if whole else io.BytesIO(read_bytes(path)))
        columns = tuple(file.schema_arrow.names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"is not a Parquet file ({type(error).__name__})", fix="write it again", file=path) from None
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
                rows = [] if batch is None else rows_of_batch(batch)
            except (OSError, ValueError, pa.ArrowException) as error:
                problem = f"is torn ({type(error).__name__})"
                raise DataError(problem, fix="write it again", file=path, row=number + 1) from None
            if batch is None:
                return
            for row in rows:
                number += 1
                yield number, row
