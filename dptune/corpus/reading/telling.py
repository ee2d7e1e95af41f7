"""Rows of which no text can be made are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dptune.corpus.reading.fields import Row, scalar, way_of
from dptune.corpus.reading.rows import Rows
from dptune.corpus.reading.source import RecordSource
from dptune.errors import DataError


def checked(source: RecordSource, found: Rows) -> Rows:
    """The same rows, which raise DataError at one of whose columns nothing can be made; here already, if of none.

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
