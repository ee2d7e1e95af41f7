"""Turns a row (a mapping from column to value) into a record, by the columns that a source names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from string import Formatter
from typing import Any

import numpy as np

from dptune.corpus.reading.record import Chat, Content, Labelled, PromptTarget, Record, Text, row_key, unit_key
from dptune.corpus.reading.source import RecordSource
from dptune.corpus.reading.template import TEXT, template_columns
from dptune.errors import DataError

UNKNOWN = "unknown"
#: How a text is made of a row: one column, a template, all columns written out, a prompt with its completion, messages.
WAYS = ("text", "template", "columns", "pair", "messages")
Row = Mapping[str, Any]
#: Makes a DataError about the row at hand from column, problem and fix; the caller raises it.
Refuse = Callable[[str, str, str], DataError]


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
        self._source, self._file, self._seen = source, file, dict[str, int]()
        self.way = way_of(source, file, columns, first_row, table)
        self._columns_of_text = tuple(name for name in columns if name not in (source.unit, source.id, source.label))
        self._unit_column, self._id_column = (None, None) if public else (source.unit, source.id)
        beside = (self._unit_column, self._id_column)
        for name in (*self._columns_needed(), *(name for name in beside if name is not None)):
            if name not in columns:
                fix = f"name one of {_list_names(columns)}"
                if name == TEXT and source.template is not None:
                    fix += f" as data.text, for which {{{TEXT}}} in the template stands"
                raise DataError("there is no such column", fix=fix, file=file, row=first_row, column=name)

    def record(self, number: int, row: Row) -> Record:
        """The record of one row.

        Raises: DataError naming row and column for a value that is missing, empty, of another type, or not text in
            Unicode, and for an id that an earlier row has.
        """

        def refuse(column: str, problem: str, fix: str) -> DataError:
            return DataError(problem, fix=fix, file=self._file, row=number, column=column)

        content, own_id = self._content(row, refuse), self._id(number, row, refuse)
        if self._source.label is not None:
            content = Labelled(_text_of(content), _label(row, self._source.label, refuse))
        return Record(content, self._unit(row, content, own_id, refuse), self._file, number, own_id)

    def _columns_needed(self) -> tuple[str, ...]:
        source = self._source
        if self.way == "pair":
            return (source.prompt or "prompt", source.completion or "completion")
        if self.way == "template":
            names = template_columns(source.template or "")
            return tuple(source.text or TEXT if name == TEXT else name for name in names)
        if self.way == "columns":
            return ()
        return (source.messages or "messages",) if self.way == "messages" else (source.text or "text",)

    def _content(self, row: Row, refuse: Refuse) -> Content:
        names = self._columns_needed()
        if self.way == "messages":
            return Chat(_messages(row, names[0], refuse))
        if self.way == "pair":
            return PromptTarget(_text(row, names[0], refuse, empty=True), _text(row, names[1], refuse))
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

    def _id(self, number: int, row: Row, refuse: Refuse) -> str | None:
        column = self._id_column
        if column is None:
            return None
        own = scalar(row, column, refuse)
        if not own:
            raise refuse(column, "the id is missing", "give every record one")
        earlier = self._seen.setdefault(own, number)
        if earlier != number:
            raise refuse(
                column, f"the id of row {earlier} appears again", "keep each record once, or name no column of ids"
            )
        return own

    def _unit(self, row: Row, content: Content, own_id: str | None, refuse: Refuse) -> int:
        column = self._unit_column
        if column is None:
            return row_key(content, own_id)
        scalar(row, column, refuse)
        try:
            key = unit_key(_value(row, column, refuse))
        except TypeError as error:
            raise refuse(column, f"holds a {error}", "give text or a number") from None
        if key is None:
            raise refuse(column, "names no unit, so nobody would be protected", "fill it in, or remove the record")
        return key


def _label(row: Row, column: str, refuse: Refuse) -> str:
    label = scalar(row, column, refuse)
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
        problem = "there is no such column, so that these rows have no labels"
        fix = f"name the column of labels, if it is one of {_list_names(columns)}, or give other records"
        raise DataError(problem, fix=fix, file=file, row=row, column=source.label)
    if source.template is not None:
        return "template"
    stated = {"messages": source.messages, "pair": source.prompt, "text": source.text}
    found = [way for way, name in stated.items() if name is not None]
    if not found and source.label is None:
        by_name = {"messages": ["messages"], "pair": ["prompt", "completion"], "text": ["text"]}
        found = [way for way, names in by_name.items() if set(names) <= set(columns)]
    elif not found and "text" in columns:
        found = ["text"]
    if len(found) > 1:
        problem = f"{' and '.join(found)} could each be the record"
        raise DataError(problem, fix="name data.text, data.prompt and completion, or data.messages", file=file, row=row)
    if not found and not table:
        problem = "has no column text, prompt and completion, or messages"
        fix = f"name one of {_list_names(columns)} as data.text, or give data.template"
        raise DataError(problem, fix=fix, file=file, row=row)
    return found[0] if found else "columns"


def _list_names(columns: Sequence[str]) -> str:
    shown = [repr(name[:40]) for name in columns[:12]]
    return ", ".join(shown) + (", ..." if len(columns) > 12 else "") if shown else "the file's columns"


def _value(row: Row, column: str, refuse: Refuse) -> Any:
    if column not in row:
        raise refuse(column, "the row lacks this column", "give every record one")
    value = row[column]
    if isinstance(value, np.generic):  # rows of Python may come from an array or a data frame
        return value.item()
    return None if type(value).__name__ == "NAType" else value


def _text(row: Row, column: str, refuse: Refuse, *, empty: bool = False) -> str:
    value = _value(row, column, refuse)
    if isinstance(value, list):
        raise refuse(column, "holds a list", "give text here, and lists of messages as data.messages")
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise refuse(column, f"holds {kind} and not text", "write it as text, or remove the record")
    if not empty and not value.strip():
        raise refuse(column, "is empty", "fill it in, or remove the record")
    return checked_text(value, lambda problem, fix: refuse(column, problem, fix))


def checked_text(text: str, refuse: Callable[[str, str], DataError]) -> str:
    """Return ``text`` if a tokenizer can read it. Raises: DataError for NUL characters and lone surrogates."""
    if "\0" in text:
        raise refuse("holds a NUL character", "remove it; a binary file is no text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise refuse("holds half of a character (a lone surrogate)", "write it as UTF-8") from None
    return text


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


def _messages(row: Row, column: str, refuse: Refuse) -> tuple[Mapping[str, Any], ...]:
    value, fix = _value(row, column, refuse), "give a list of messages such as {'role': 'user', 'content': 'Hello'}"
    if isinstance(value, str):  # a table holds lists as JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise refuse(column, "is no list of messages, nor one as JSON", fix) from None
    if not isinstance(value, list | tuple) or not value:
        raise refuse(column, "is no list of messages", fix)
    for place, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise refuse(column, f"message {place} is no mapping", fix)
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise refuse(column, f"message {place} has no text as its {name}", fix)
            checked_text(message[name], lambda problem, fix: refuse(column, problem, fix))
    return tuple(_present(message) for message in value)


def _present(value: Any) -> Any:
    """``value`` without the names whose value is None, in all its mappings.

    Arrow gives every message of a column the same names. One record's tool call would so add an empty name to the
    messages of all others, and change their keys and their sides of the split.
    """
    if isinstance(value, Mapping):
        return {name: _present(one) for name, one in value.items() if one is not None}
    return [_present(one) for one in value] if isinstance(value, list | tuple) else value
