"""Rows of a JSON file: one object on every line, or one array of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dptune.core.errors import DataError
from dptune.records.reading.fields import Row
from dptune.records.reading.rows import Rows, read_text, rows_like_first
from dptune.records.reading.shapes import ALPACA, KNOWN, columns_of
from dptune.records.reading.source import RecordSource

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
