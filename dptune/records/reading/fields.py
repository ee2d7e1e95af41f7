"""Turns a row (a mapping from column to value) into a record, by the columns that a source names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from string import Formatter
from typing import Any

import numpy as np

from dptune.core.errors import DataError
from dptune.records.reading.findings import Findings
from dptune.records.reading.record import (
    TEMPLATE_INPUTS,
    Chat,
    Content,
    Labelled,
    PromptTarget,
    Record,
    Text,
    name_key,
    row_key,
)
from dptune.records.reading.shapes import (
    ALPACA,
    ALPACA_INPUT,
    KNOWN,
    Refuse,
    alpaca_prompt,
    chat_of,
    columns_of,
    fix_of,
    is_messages,
    pair_fix,
)
from dptune.records.reading.source import TEXT, RecordSource, template_columns
from dptune.records.reading.spelling import checked_text, is_missing, is_visible, spelled

UNKNOWN = "unknown"
#: How a text is made of a row, in words.
WAYS = {
    "text": "texts of one column",
    "template": "texts of a template",
    "columns": 'all columns written out ("name is value.")',
    "pair": "prompts with completions",
    "messages": "chats",
}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """What stands in a row for a value that its source holds and Python cannot: refused where its column is read."""

    problem: str
    fix: str


#: A date or time beyond what Python's ``datetime`` holds.
TOO_FAR = Unreadable("holds a date outside the years 1 to 9999", "correct it, or write it as text")


class RecordMaker:
    """Makes records of the rows of one file, in order.

    The columns to read are chosen once, from the header or the first row, so that all rows are read alike.
    """

    def __init__(
        self,
        source: RecordSource,
        file: str,
        columns: Sequence[str],
        first_row: int,
        table: bool,
        public: bool = False,
    ) -> None:
        """Find the columns.

        Args:
            first_row: number of the row that holds ``columns``, for messages.
            table: whether every row has all of ``columns``, so that it can be written out without a template.
            public: whether these are records of nobody; their columns of units and ids are not read.

        Raises: DataError if a named column is absent, none is named and none can be found, or several could be meant.
        """
        self._source, self._file, self._columns, self._seen = source, file, columns, dict[str, int]()
        self.findings = Findings(headings=file.lower().endswith((".md", ".md.gz")))
        self._later, self._given = dict[str, None](), frozenset(columns)
        self.way = way_of(source, file, columns, first_row, table)
        self._known = columns_of(self.way, columns) if self.way in KNOWN else None
        self._in_messages: bool | None = None
        self._alpaca = self.way == "pair" and source.prompt is None and self._known is None
        if (source.prompt, source.completion) == ALPACA and ALPACA_INPUT in columns:
            fix = "name neither data.prompt nor data.completion, and instruction, input and output are read together"
            raise DataError("would be left out of the prompt", fix=fix, file=file, row=first_row, column=ALPACA_INPUT)
        self._columns_of_text = tuple(name for name in columns if name not in (source.unit, source.id, source.label))
        self._unit_column, self._id_column = (None, None) if public else (source.unit, source.id)
        beside = (self._unit_column, self._id_column)
        for name in (*self._columns_needed(), *(name for name in beside if name is not None)):
            if name not in columns:
                fix = f"name one of {_list_names(columns)}"
                if name == TEXT and source.template is not None:
                    fix += f" as data.text, for which {{{TEXT}}} in the template stands"
                raise DataError("this column does not exist", fix=fix, file=file, row=first_row, column=name)

    def record(self, number: int, row: Row) -> Record:
        """The record of one row.

        Raises: DataError naming row and column for a value that is missing, empty, of another type, or not text in
            Unicode, and for an id that an earlier row has.
        """

        def refuse(column: str, problem: str, fix: str) -> DataError:
            return DataError(problem, fix=fix, file=self._file, row=number, column=column)

        self._later |= {str(name): None for name in row if str(name) not in self._given}
        content = self._content(row, refuse)
        own_id = None if self._id_column is None else self._id(self._id_column, number, row, refuse)
        if self._source.label is not None:
            label = _label(row, self._source.label, refuse)
            self.findings.labels.add(label, row[self._source.label], number)
            content = Labelled(_text_of(content), label)
        unit = self._unit(number, row, content, own_id, refuse)
        self.findings.add(number, row, content)
        if isinstance(content, Chat):
            return Record(content, unit, self._file, number, own_id, self._columns_needed())
        return Record(content, unit, self._file, number, own_id)

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns that nothing is made of, though the source names no column of the record, so that nobody chose it."""
        return self._unread(self._columns)

    @property
    def unread_later(self) -> tuple[str, ...]:
        """Such columns that rows so far have and the first lacks. Private: one record may have brought them."""
        return self._unread(self._later)

    def _unread(self, columns: Iterable[str]) -> tuple[str, ...]:
        source = self._source
        if any((source.text, source.prompt, source.messages, source.template)) or self.way == "columns":
            return ()
        chats = self.way == "messages" or self._in_messages
        read = {*self._columns_needed(), source.unit, source.id, source.label, *(TEMPLATE_INPUTS if chats else ())}
        return tuple(name for name in columns if name not in read | ({ALPACA_INPUT} if self._alpaca else set()))

    def _columns_needed(self) -> tuple[str, ...]:
        source = self._source
        if self._alpaca:
            return ALPACA
        if self.way == "pair":
            return (source.prompt or "prompt", source.completion or "completion")
        if self.way == "template":
            names = template_columns(source.template or "")
            return tuple(source.text or TEXT if name == TEXT else name for name in names)
        if self.way == "columns":
            return ()
        named = source.messages if self.way == "messages" else source.text
        return (named,) if named is not None else self._known or (self.way,)

    def _content(self, row: Row, refuse: Refuse) -> Content:
        names = self._columns_needed()
        named = (self._source.unit, self._source.id, self._source.label)
        if self.way == "pair":
            values = [_value(row, name, refuse) for name in names]
            chats = any(is_messages(value) for value in values)
            self._in_messages = chats if self._in_messages is None else self._in_messages
            if chats != self._in_messages:  # the first record decides what all of them are
                kinds = ("messages", "text") if chats else ("text", "messages")
                raise refuse(names[0], f"holds {kinds[0]}, and the first record {kinds[1]}", "write all in one way")
            if chats and isinstance(values[0], str) and is_messages(values[1]) and not is_messages(values[0]):
                fix = f"name {names[1]} as data.messages, if it holds the whole chat"
                raise refuse(names[0], f"is text, and {names[1]} holds messages", fix)
            if chats:
                return _chat(row, names, named, refuse)
            prompt, target = _text(row, names[0], refuse, empty=True), _text(row, names[1], refuse)
            if not self._alpaca:
                return PromptTarget(prompt, target)
            more = "" if row.get(ALPACA_INPUT) is None else _text(row, ALPACA_INPUT, refuse, empty=True)
            return PromptTarget(alpaca_prompt(prompt, more), target)
        if self.way == "messages":
            return _chat(row, names, named, refuse)
        if self.way == "text":
            return Text(_text(row, names[0], refuse))
        if self.way == "template":
            parts = Formatter().parse(self._source.template or "")
            return Text(
                "".join(before + (self._filled(row, name, refuse) if name else "") for before, name, _, _ in parts)
            )
        sentences = (
            f"{name.replace('_', ' ')} is {_value_or_unknown(row, name, refuse)}." for name in self._columns_of_text
        )
        return Text(" ".join(sentences))

    def _filled(self, row: Row, name: str, refuse: Refuse) -> str:
        """What takes the place of a name in a template: the record's text must be there, another value need not."""
        if name == TEXT and self._source.text is not None:
            return _text(row, self._source.text, refuse).strip()
        return _value_or_unknown(row, name, refuse)

    def _id(self, column: str, number: int, row: Row, refuse: Refuse) -> str:
        own = scalar(row, column, refuse)
        if not own:
            raise refuse(column, "the id is missing", "give every record one")
        earlier = self._seen.setdefault(own, number)
        if earlier != number:
            raise refuse(
                column, f"the id of row {earlier} appears again", "keep each record once, or name no column of ids"
            )
        return own

    def _unit(self, number: int, row: Row, content: Content, own_id: str | None, refuse: Refuse) -> int:
        column = self._unit_column
        if column is None:
            return row_key(content, own_id)
        scalar(row, column, refuse)
        value = _value(row, column, refuse)
        try:
            name = spelled(value)
        except TypeError as error:
            raise refuse(column, f"holds a {error}", "give text or a number") from None
        if name is None or is_missing(name):
            said = f" ({name!r} says that it is missing)" if name else ""
            problem = f"names no unit{said}, so the record would not be protected"
            raise refuse(column, problem, "fill it in, or remove the record")
        self.findings.units.add(name, value, number)
        return name_key(name)


def _chat(row: Row, columns: Sequence[str], named: Sequence[str | None], refuse: Refuse) -> Content:
    for column in columns:
        _value(row, column, refuse)  # raises where the row lacks it
    try:
        return chat_of(row, columns, named, refuse)
    except RecursionError:
        raise refuse(
            columns[0], "is nested too deeply", "give messages and tools as chat templates take them"
        ) from None


def _label(row: Row, column: str, refuse: Refuse) -> str:
    label = spelled(scalar(row, column, refuse))
    if not label:
        raise refuse(column, "the label is missing", "fill it in, or remove the record")
    return label


def _text_of(content: Content) -> str:
    assert isinstance(content, Text)  # the other kinds have no label (``way_of``, ``RecordSource``)
    return content.text


def way_of(source: RecordSource, file: str, columns: Sequence[str], row: int, table: bool) -> str:
    """How records are made of rows, one of ``WAYS``.

    Raises: DataError if several ways or none could be meant, or if the column of labels is absent.
    """
    if source.label is not None and source.label not in columns:
        problem = "this column does not exist, so these rows have no labels"
        fix = f"name the column of labels, if it is one of {_list_names(columns)}, or give other records"
        raise DataError(problem, fix=fix, file=file, row=row, column=source.label)
    if source.template is not None:
        return "template"
    stated = {"messages": source.messages, "pair": source.prompt, "text": source.text}
    found = [way for way, name in stated.items() if name is not None]
    if not found and source.label is None:
        found = [way for way in KNOWN if columns_of(way, columns) is not None]
        if not found and set(ALPACA) <= set(columns):
            return "pair"
    elif not found and "text" in columns:
        found = ["text"]
    if len(found) > 1:
        problem = f"{' and '.join(found)} could each be the record"
        raise DataError(problem, fix="name data.text, data.prompt and completion, or data.messages", file=file, row=row)
    known = None if found or source.label is not None else fix_of(columns)
    if known is not None or (not found and not table):
        problem = "has no column text, prompt and completion, or messages"
        fix = known or pair_fix(columns) or f"name one of {_list_names(columns)} as data.text, or give data.template"
        raise DataError(problem, fix=fix, file=file, row=row)
    return found[0] if found else "columns"


def note_of_unread(columns: Sequence[str]) -> list[str]:
    """A note on columns of which nothing is made (``RecordMaker.unread``); none where there are none."""
    if not columns:
        return []
    return [f"columns that are not read: {_list_names(columns)}; name the record's own (data.text or others) to choose"]


def _list_names(columns: Sequence[str]) -> str:
    shown = [repr(name[:40]) for name in columns[:12]]
    return ", ".join(shown) + (", ..." if len(columns) > 12 else "") if shown else "the file's columns"


def _value(row: Row, column: str, refuse: Refuse) -> Any:
    if column not in row:
        raise refuse(column, "the row lacks this column", "give every record one")
    value = row[column]
    if isinstance(value, np.datetime64) and not np.isnat(value):  # as a number it would name another unit than as text
        value = value.astype("datetime64[us]").item()
        value = value if isinstance(value, datetime) else TOO_FAR
    if isinstance(value, Unreadable):
        raise refuse(column, value.problem, value.fix)
    if isinstance(value, np.ndarray):  # what a data frame has in place of a list
        return value.tolist()
    if isinstance(value, np.generic):  # rows of Python may come from an array or a data frame
        return value.item()
    return None if type(value).__name__ == "NAType" else value


def _text(row: Row, column: str, refuse: Refuse, *, empty: bool = False) -> str:
    value = _value(row, column, refuse)
    if isinstance(value, list):
        raise refuse(column, "holds a list", "give text here, and lists of messages as data.messages")
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise refuse(column, f"holds {kind}, not text", "write it as text, or remove the record")
    if not empty and not is_visible(value):
        problem = "holds only characters that nobody sees" if value.strip() else "is empty"
        raise refuse(column, problem, "fill it in, or remove the record")
    return checked_text(value, lambda problem, fix: refuse(column, problem, fix))


def scalar(row: Row, column: str, refuse: Refuse) -> str:
    """A value as text; "" where it is missing."""
    value = _value(row, column, refuse)
    if value is None or value != value:  # a NaN is how some tables say nothing
        return ""
    if isinstance(value, Mapping | list | tuple | set | bytes):
        raise refuse(column, f"holds a {type(value).__name__}", "give text or a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table turns a whole column into 7.0 where one record's value is missing
    text = str(value).strip()
    return checked_text(text, lambda problem, fix: refuse(column, problem, fix))


def _value_or_unknown(row: Row, column: str, refuse: Refuse) -> str:
    return scalar(row, column, refuse) or UNKNOWN
