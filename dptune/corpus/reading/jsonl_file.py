"""Rows of a JSONL file: one object on every line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dptune.corpus.reading.fields import Row
from dptune.corpus.reading.rows import Rows, read_text, rows_like_first
from dptune.corpus.reading.source import RecordSource
from dptune.errors import DataError


def jsonl_rows(source: RecordSource, path: Path) -> Rows:
    """Read the rows of a JSONL file: each line that is not empty is a row, with the line's number."""
    return rows_like_first(str(path), _objects(path, read_text(path)))


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
