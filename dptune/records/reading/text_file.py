"""Rows of a text file: its paragraphs, or its lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dptune.core.errors import DataError
from dptune.records.reading.formats import refuse_other_text
from dptune.records.reading.rows import Rows, read_text
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
