"""Text and JSON files: rows are a text's paragraphs or lines, and a JSON file's objects, on lines or in an array."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dptune.core.errors import DataError
from dptune.records.reading.fields import Row
from dptune.records.reading.formats import refuse_other_text
from dptune.records.reading.rows import Rows, read_text, rows_like_first
from dptune.records.reading.shapes import ALPACA, KNOWN, columns_of
from dptune.records.reading.source import RecordSource

#: Recognition of JSON and tables: number of lines to look at, number of them that must match, least number of fields.
_LOOKED_AT, _ENOUGH, _FIELDS = 50, 5, 3
#: A line of names alone, as a table's header is.
_HEADER = re.compile(r'"?\w+"?(?:([,;\t|])"?\w+"?)+')


def text_rows(source: RecordSource, path: Path) -> Rows:
    """Read the rows of a text file: each paragraph or line is a row, with the number of its first line."""
    content = read_text(path)
    lines = content.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    _refuse_other_formats(path, lines, way_is_chosen=source.records_are is not None)
    by_paragraph = any(not line.strip() for line in _inner(lines))
    if source.records_are is None and by_paragraph:
        _refuse_joined_records(path, lines)
    if source.records_are == "lines" or (source.records_are is None and not by_paragraph):
        found = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    else:
        found = list(_paragraphs(lines))
    if not found:
        raise DataError("holds no records", fix="give one at least", file=path)
    # The column is called what the source calls it, so that text needs no case of its own.
    column = source.text or "text"
    texts = ((number, {column: text}) for number, text in found)
    return Rows(str(path), (column,), 1, False, texts, open_end=lines[-1] != "")


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


def _refuse_joined_records(path: Path, lines: Sequence[str]) -> None:
    """Refuse a file of which lines and paragraphs are different records: an empty line here and there may mean nothing,
    and would join all records between two of them. No share of empty lines tells which they are.
    """
    paragraphs, filled = len(list(_paragraphs(lines))), sum(bool(line.strip()) for line in lines)
    if filled > paragraphs:
        row = 1 + next(number for number, line in enumerate(lines) if not line.strip())
        problem = f"has {filled} lines and {paragraphs} paragraphs, and either could be the records"
        raise DataError(problem, fix="choose data.records_are lines, or paragraphs", file=path, row=row)


def _refuse_other_formats(path: Path, every: Sequence[str], *, way_is_chosen: bool) -> None:
    unless = "; or data.records_are lines (or paragraphs), if it is text"
    refuse_other_text(path, every, "text", unless=unless, chosen=way_is_chosen)
    lines = [line for line in every[:_LOOKED_AT] if line.strip()]
    header = None if way_is_chosen or len(lines) < 2 else _HEADER.fullmatch(lines[0])
    if header is not None and all(header[1] in line for line in lines):
        fix = f"use data.format table{unless}"
        raise DataError("begins with names of columns and is read as text", fix=fix, file=path, row=1)
    if len(lines) < _ENOUGH:
        return
    bare = [re.sub('"[^"]*"', "", line) for line in lines]  # a delimiter within quotes is of a field
    for delimiter, least in () if way_is_chosen else ((",", _FIELDS), ("\t", 2)):
        fields = [line.split(delimiter) for line in bare]
        sentences = all(f"{delimiter} " in line for line in bare) and any(
            len(one.split()) > 4 for line in fields for one in line
        )
        if len({*map(len, fields)}) == 1 and len(fields[0]) >= least and not sentences:
            fix = f"use data.format table{unless}"
            raise DataError("looks like a table and is read as text", fix=fix, file=path, row=1)


#: What the file may hold, for messages.
_WANTED = "one object on every line, or one array of objects"


def jsonl_rows(source: RecordSource, path: Path) -> Rows:
    """Read the rows of a JSON file: each line that is not empty is a row, with the line's number.

    Of a file that is one array each element is a row, with its place from 1.
    """
    content = read_text(path)
    whole = content.lstrip().startswith("[")
    _refuse_one_object(source, path, content)
    return rows_like_first(str(path), _elements(path, content) if whole else _lines(path, content))


def _refuse_one_object(source: RecordSource, path: Path, content: str) -> None:
    """Refuse a file that is one object on several lines, or one around an array of objects that are no messages."""
    first, _, rest = content.strip().partition("\n")
    if not first.startswith("{") or (rest and _is_json(first)) or not _is_json(content):
        return
    value = json.loads(content)
    arrays = [name for name, held in value.items() if isinstance(held, list) and held and all(map(_is_row, held))]
    columns = [held for held in value.values() if isinstance(held, list | dict)]
    if not rest and len(columns) == len(value) > 1 and not {"messages", "conversations", "prompt"} & {*value}:
        problem, fix = "is one JSON object of whole columns", "write an object for each row (pandas: orient='records')"
        raise DataError(problem, fix=fix, file=path, row=1)
    chosen = any((source.text, source.prompt, source.messages, source.template))
    found = {*ALPACA} <= {*value} or any(columns_of(way, [*value]) for way in KNOWN)
    if not rest and (chosen or found or not arrays):  # a single record
        return
    problem = "is one JSON object" + (f", which holds an array of objects in {arrays[0]!r}" if arrays else "")
    fix = f"write the array of {arrays[0]!r} alone" if arrays else "write each object on one line, or in an array"
    raise DataError(problem, fix=fix, file=path, row=1)


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and not {"role", "from"} & {*value}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(path: Path, content: str) -> Iterator[tuple[int, Row]]:
    for number, text in enumerate(content.split("\n"), start=1):
        line = text.removeprefix("\ufeff")  # where files were put behind each other
        if line.strip():
            yield number, _object(path, number, _parsed(path, number, line))


def _elements(path: Path, content: str) -> Iterator[tuple[int, Row]]:
    for number, value in enumerate(_parsed(path, 1, content), start=1):
        yield number, _object(path, number, value)


def _parsed(path: Path, row: int, text: str) -> Any:
    """The value of JSON that begins in a line of the file."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        problem = f"is not valid JSON ({error})" if isinstance(error, _RepeatedError) else "is not valid JSON"
        broken = row - 1 + error.lineno if isinstance(error, json.JSONDecodeError) else row
        raise DataError(problem, fix=f"write {_WANTED}", file=path, row=broken) from None


def _object(path: Path, number: int, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError("is JSON but not an object", fix=f'write {_WANTED}: {{"text": ...}}', file=path, row=number)
    return value


class _RepeatedError(ValueError):
    """A name that an object gives twice: one of the two values would be lost without a word."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise _RepeatedError("a name comes twice in one object")
    return row
