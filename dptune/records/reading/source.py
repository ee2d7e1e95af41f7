"""Describes where a user's records are and how to read them. What needs no data is checked at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from dptune.core.errors import ConfigError
from dptune.core.files import sha256
from dptune.records.reading.formats import ENDINGS, FORMATS, PACKED, Format, ending_of, refuse_binary

#: A path or a hub name; or rows: mappings from column to value, such as a list of dicts or a ``datasets.Dataset``; or a
#: ``pandas.DataFrame`` or ``pyarrow.Table``.
Data = str | Path | Iterable[Mapping[str, Any]]

#: What the records of a text file may be.
RecordsAre = Literal["lines", "paragraphs"]

#: Number of bytes by which a file that is not text is recognised.
_BEGINNING = 4096

#: A commit of the hub.
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Fractions:
    """Shares of the units that each side of the split gets; a unit's side is a keyed hash of its own key alone.

    Attributes:
        train, eval, test: shares that add up to 1.
        seed: key of the hash; public.

    Example:
        >>> from dptune.records.reading.source import Fractions
        >>> Fractions(train=0.9, eval=0.1, test=0)
        Fractions(train=0.9, eval=0.1, test=0, seed=42)
    """

    train: float = 0.8
    eval: float = 0.1
    test: float = 0.1
    seed: int = 42

    def __post_init__(self) -> None:
        shares = (self.train, self.eval, self.test)
        if not (all(0 <= share <= 1 for share in shares) and self.train > 0 and math.isclose(sum(shares), 1)):
            problem = f"train, eval and test are {', '.join(map(str, shares))}"
            raise ConfigError("data.split", problem, fix="give shares that add up to 1, with train above 0")


@dataclass(frozen=True)
class GivenSides:
    """A split that exists already: ``RecordSource.data`` is the train side, and these are the others."""

    eval: Data | None = field(default=None, repr=False)
    test: Data | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RecordSource:
    """Where records are and how they are read.

    Without names of columns here, columns called ``messages``, ``prompt`` and ``completion``, or ``text`` are taken. A
    table that has none of them becomes text column by column: "column is value."

    Attributes:
        data: a path, the name of a hub data set, or rows; see ``Data``. Left out of repr, for rows are private.
        format: format of the file; None goes by the file's ending.
        text, prompt, completion, messages: names of columns; ``prompt`` and ``completion`` go together.
        label: the column of labels, for classification; beside it ``text``, ``template`` or the other columns are the
            text.
        template: a text with columns in braces, such as ``"{age}-year-old, {diagnosis}"``; a missing value is
            "unknown". Doubled braces are braces. Beside ``text``, ``{text}`` stands for that column.
        unit: the column whose values name units of privacy; None: every record is a unit of its own.
        id: the column of the records' own ids, which must be distinct.
        records_are: the records of a text file: "lines", or "paragraphs" between empty lines, whose white space becomes
            single spaces. None takes either, and refuses a file in which they are different records.
        made_by: the benchmark whose function made the rows (``source``) and those of its options that decide what is
            written in a text; empty for other rows. Public.
        revision: the 40-digit commit of a hub data set.
        part: part of a data set of the ``datasets`` library to read, such as "train".
        public: records of nobody, read in the same way, for validation, controllers and rehearsal.
        split: how the records of ``data`` are dealt to train, eval and test.

    Example:
        >>> from dptune.records.reading.read import read
        >>> from dptune.records.reading.source import RecordSource
        >>> rows = [{"patient": "p1", "age": 61, "note": "Stable."}, {"patient": "p2", "age": None, "note": "Worse."}]
        >>> source = RecordSource(rows, template="{age}-year-old. {note}", unit="patient")
        >>> [record.content.text for record in read(source)]
        ['61-year-old. Stable.', 'unknown-year-old. Worse.']
    """

    data: Data = field(repr=False)
    format: Format | None = None
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    template: str | None = None
    label: str | None = None
    unit: str | None = None
    id: str | None = None
    records_are: RecordsAre | None = None
    revision: str | None = None
    part: str = "train"
    made_by: Mapping[str, str] = field(default_factory=dict)
    public: Data | None = field(default=None, repr=False)
    split: Fractions | GivenSides = Fractions()

    def __post_init__(self) -> None:
        if self.format not in (None, *FORMATS):
            raise ConfigError("data.format", f"{self.format!r} is unknown", fix=f"use one of {', '.join(FORMATS)}")
        if self.records_are not in (None, "lines", "paragraphs"):
            problem = f"{self.records_are!r} is unknown"
            raise ConfigError("data.records_are", problem, fix="use lines or paragraphs")
        ways = [
            name for name in ("text", "prompt", "completion", "messages", "template") if getattr(self, name) is not None
        ]
        if ways not in ([], ["text"], ["prompt", "completion"], ["messages"], ["template"], ["text", "template"]):
            fix = "give text, template or both, or prompt with completion, or messages"
            raise ConfigError("data", f"{' and '.join(ways)} cannot be given like this", fix=fix)
        if self.label is not None and ways[:1] in (["prompt"], ["messages"]):
            problem = f"does not go with data.{ways[0]}"
            raise ConfigError("data.label", problem, fix="give data.text or data.template beside it")
        columns = template_columns(self.template) if self.template is not None else ()
        if self.label is not None and self.label in (self.text, *columns):
            problem = f"column {self.label!r} is also part of the text, so the text would reveal the label"
            raise ConfigError("data.label", problem, fix="leave it out of data.text and data.template")
        if self.template is not None and self.text is not None and TEXT not in columns:
            problem = f"{self.template!r} has no {{{TEXT}}}, so column {self.text!r} would not be read"
            raise ConfigError("data.template", problem, fix=f"write {{{TEXT}}} in it, or leave data.text out")
        refuse_same(self.data, self.public)

    def format_of(self, path: Path) -> Format:
        """The format of a file: ``format`` if it is given, else by the file's ending.

        Raises: ConfigError if neither decides it, or if ``format`` is text and the ending is that of another format;
            DataError for a file without a known ending that no format reads, such as a pickle.
        """
        by_ending = ENDINGS.get(ending_of(path))
        if self.format == "text" and by_ending not in (None, "text"):
            problem = f"is text, and {path.name} is {FORMATS[by_ending].title} by its ending"
            raise ConfigError("data.format", problem, fix=f"use {by_ending}, or give the file another ending")
        if path.is_dir() and self.format in (None, "datasets"):
            return "datasets"
        if self.format is None and by_ending is None:
            if path.is_file() and path.suffix.lower() != PACKED:  # a format that is not read, such as a pickle
                with path.open("rb") as file:
                    refuse_binary(path, file.read(_BEGINNING))
            problem = f"the ending of {path.name} does not show the format"
            raise ConfigError("data.format", problem, fix=f"give data.format, one of {', '.join(FORMATS)}")
        return self.format or by_ending or "text"


def refuse_same(data: Data | None, public: Data | None, field: str = "data.public") -> None:
    """Raises: ConfigError if the public records are the private ones: what is computed from them costs no budget."""
    if data is None or public is None:
        return
    paths = [Path(one) for one in (data, public) if isinstance(one, str | Path)]
    if data is public or (len(paths) == 2 and are_same(*paths)):
        problem = "is the file of private records; public records are used and shown without any privacy cost"
        raise ConfigError(field, problem, fix="give other records, which are public, or leave it out")


def are_same(one: Path, other: Path) -> bool:
    """Whether two paths name one file or folder, or two files of the same bytes."""
    if not (one.exists() and other.exists()):
        return one == other
    if one.samefile(other):
        return True
    files = one.is_file() and other.is_file() and one.stat().st_size == other.stat().st_size
    return files and sha256(one) == sha256(other)


def is_hub_name(source: RecordSource, data: Data) -> bool:
    """Whether ``data`` is a data set of the hub, by name; never where a file or folder of that name exists.

    Raises: ConfigError unless its revision is a commit.
    """
    if not isinstance(data, str) or Path(data).exists() or source.format not in (None, "datasets"):
        return False
    if source.format is None and source.revision is None:
        return False  # more likely a path that does not exist, whose message is the better one
    if not (source.revision and COMMIT.fullmatch(source.revision)):
        problem = f"{data!r} is not a local folder, and its revision {source.revision!r} is not a commit"
        raise ConfigError("data.revision", problem, fix="give the 40-digit commit of the data set")
    return True


#: What stands in a template for the column that ``RecordSource.text`` names.
TEXT = "text"


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, in order.

    Raises: ConfigError if it is malformed, names no column, or gives a column a format such as ``{age:d}``.
    """
    fix = "write columns in braces, as in 'age is {age}', and double other braces"
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ConfigError("data.template", f"is malformed ({error})", fix=fix) from None
    columns = tuple(name for _, name, _, _ in parts if name is not None)
    if not columns or "" in columns or any(form or turned for _, name, form, turned in parts if name):
        raise ConfigError("data.template", "names no columns, or gives one a format", fix=fix)
    return columns


def make_same_texts(one: str, other: str) -> bool:
    """Whether two templates make the same texts of rows whose columns may have other names."""
    if {*template_columns(one)} == {*template_columns(other)}:
        return one == other
    return _by_number(one) == _by_number(other)


def _by_number(template: str) -> list[tuple[str, int | None]]:
    """The template's pieces of text, each with the number of the column behind it, in order of first appearance."""
    seen = dict[str, int]()
    parts = Formatter().parse(template)
    return [(before, None if name is None else seen.setdefault(name, len(seen))) for before, name, _, _ in parts]
