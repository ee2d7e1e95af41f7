"""Where records come from, by name. Every source declares and checks its own options.

A source of one's own is a function that yields one text a record, or one row: a mapping from column to value, of which
any column may be the unit. Its parameters are what ``data.options`` gives::

    @source("letters")
    def letters(folder: str, newest: int = 100) -> Iterator[str]: ...

    @source("orders", rows=True)
    def orders(database: str) -> Iterator[Mapping[str, Any]]: ...

They are registered by plug-ins (``dptune.core.plugins``): modules that are named, and entry points ``dptune.sources``.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from dptune.core.errors import ConfigError, DataError, DptuneError
from dptune.core.plugins import is_outside, load_installed, note_registered, plugins_of
from dptune.core.settings import RECORD
from dptune.records.benchmarks import BENCHMARKS
from dptune.records.diabetes.sources import acquire_synthetic, acquire_uci
from dptune.records.own_files import (
    WITH_COLUMNS,
    acquire_file,
    acquire_text,
    form_at,
    source_of,
    write_corpus,
    write_found,
)
from dptune.records.reading.formats import Format
from dptune.records.reading.read import rows_of
from dptune.records.reading.source import RecordSource

Read = Callable[..., Iterable[Any]]


@dataclass(frozen=True)
class SourceSettings:
    """What params.yaml says of the data.

    Attributes:
        path: a file or folder; None if the source needs none.
        unit: the unit of privacy, "record" or the name of a column.
        options: the source's own options, ``data.options``.
        label: the column of labels, for classifiers; None reads texts.
        dvc_cache: the root of DVC's cache, if there is one.
    """

    path: Path | None = None
    unit: str = RECORD
    options: Mapping[str, Any] = field(default_factory=dict)
    dvc_cache: Path | None = None
    label: str | None = None


@dataclass(frozen=True)
class Source:
    """A place that records come from, as functions of its settings.

    Attributes:
        acquire: writes the records into a folder, whole or not at all, and returns the file that holds them.
        check: raises ConfigError for options that the source does not take.
        look: returns the form of the records (one of ``records.FORMS``) within seconds; raises ConfigError or
            DataError for what cannot be read.
        units: the units of privacy that it knows; None allows any column.
        module: name of the plug-in's module; empty for dptune's own sources.
        rows: describes the records for a reader of rows; None for dptune's own sources, which are files.
        kinds: the types of a plug-in's parameters, by name; those without one are missing.
    """

    acquire: Callable[[Path, SourceSettings], Path]
    check: Callable[[SourceSettings], object]
    look: Callable[[SourceSettings], str]
    units: tuple[str, ...] | None = (RECORD,)
    module: str = ""
    rows: Callable[[SourceSettings], RecordSource] | None = None
    kinds: Mapping[str, Any] = field(default_factory=dict)


def source(name: str, *, rows: bool = False) -> Callable[[Read], Read]:
    """Register a function that yields texts, or rows. Raises ConfigError if the name is taken.

    Args:
        rows: whether it yields mappings with a column ``text``, or ``prompt`` and ``completion``, or ``messages``.
            ``data.unit`` may then name any column.

    Example:
        >>> from dptune.records.catalogue import find_source, source
        >>> @source("two_letters")
        ... def two_letters(greeting: str = "Dear"):
        ...     yield f"{greeting} Sir, the card payment was charged twice."
        ...     yield f"{greeting} Madam, my loan was refused."
        >>> find_source("two_letters").kinds
        {'greeting': <class 'str'>}
    """

    def register(read: Read) -> Read:
        other = SOURCES.get(name)
        if other is not None and other.module != read.__module__:
            raise ConfigError("plugins", f"source {name!r} of {read.__module__} already exists", fix="rename it")
        SOURCES[name] = _of_function(name, read, rows=rows)
        note_registered(read.__module__)
        return read

    return register


def find_source(name: str) -> Source:
    """The source of a name. Raises: ConfigError if there is none."""
    if name not in SOURCES:
        load_installed("dptune.sources")
    if name not in SOURCES:
        problem, known = f"unknown source {name!r}", ", ".join(SOURCES)
        raise ConfigError(
            "data.source", problem, fix=f"use one of {known}; a plug-in's takes plugins: [MODULE] or --plugin MODULE"
        )
    return SOURCES[name]


def plugin_sources() -> list[str]:
    """Names of the sources that plug-ins registered."""
    return [name for name, found in SOURCES.items() if found.rows is not None]


def _look_of_text(_given: SourceSettings) -> str:
    return "text"


def _look_of_narratives(given: SourceSettings) -> str:
    return "text" if given.label is None else "label"


# --- the diabetes table ----------------------------------------------------------------------------------------


def _refuse_options(name: str, given: SourceSettings) -> None:
    if given.options:
        problem = f"source {name} takes none"
        raise ConfigError("data.options", problem, fix="leave them out, or use a plug-in's source")


def _synthetic(directory: Path, given: SourceSettings) -> Path:
    return acquire_synthetic(directory, **given.options).table


def _uci(directory: Path, given: SourceSettings) -> Path:
    return acquire_uci(directory, given.path, dvc_cache=given.dvc_cache).table


# --- files of one's own ------------------------------------------------------------------------------------------


def _path_of(name: str, given: SourceSettings) -> Path:
    if given.path is None:
        raise ConfigError("data.path", f"source {name} needs the path of a file", fix="give data.path")
    return given.path


def _copy_text(directory: Path, given: SourceSettings) -> Path:
    return acquire_text(directory, _path_of("text", given), given.options.get("records_are"))


def _look_at_text(given: SourceSettings) -> str:
    rows_of(_check_text(given), _path_of("text", given))
    return "text"


def _check_text(given: SourceSettings) -> RecordSource:
    path, others = _path_of("text", given), set(given.options) - {"records_are"}
    if others:
        problem = f"source text takes only records_are, not {', '.join(sorted(others))}"
        raise ConfigError("data.options", problem, fix="leave the others out, or use source table")
    return RecordSource(path, format="text", **given.options)


def _file_source(name: Format) -> Source:
    def check(given: SourceSettings) -> RecordSource:
        return source_of(name, _path_of(name, given), given.unit, given.options, given.label)

    def acquire(directory: Path, given: SourceSettings) -> Path:
        return acquire_file(directory, name, _path_of(name, given), given.unit, given.options, given.label)

    return Source(acquire, check, lambda given: form_at(check(given)), units=None)


# --- functions of plug-ins -----------------------------------------------------------------------------------------


def _of_function(name: str, read: Read, *, rows: bool) -> Source:
    signature = inspect.signature(read)

    def options_of(given: SourceSettings) -> dict[str, Any]:
        return {**({} if given.path is None else {"path": str(given.path)}), **given.options}

    def check(given: SourceSettings) -> None:
        if given.path is not None and "path" not in signature.parameters:
            problem = f"source {name!r} is a function, which takes no path"
            raise ConfigError("data.path", problem, fix="leave it empty, and give data.options what the function takes")
        try:
            signature.bind(**options_of(given))
        except TypeError as error:
            problem = f"source {name!r} does not take them ({error})"
            named = ", ".join(signature.parameters)
            fix = f"its parameters are {named}" if named else "leave them out: this source takes no options"
            raise ConfigError("data.options", problem, fix=fix) from None

    def call_function(given: SourceSettings) -> Iterator[Any]:
        check(given)
        yield from _called(name, read, options_of(given))

    def as_rows(given: SourceSettings) -> RecordSource:
        found = call_function(given)
        if not rows:
            found = ({"text": text} for text in found)
        unit, made_by = None if given.unit == RECORD else given.unit, _made_by(name, given.options)
        return RecordSource(found, unit=unit, label=given.label, made_by=made_by)

    def acquire(directory: Path, given: SourceSettings) -> Path:
        label = label_of(name, given.options)
        if rows:
            return write_found(directory, as_rows(given), "table", label, label)
        return write_corpus(directory, list(call_function(given)), label)

    look = (lambda given: form_at(as_rows(given))) if rows else _look_of_text
    return Source(acquire, check, look, None if rows else (RECORD,), read.__module__, as_rows, get_type_hints(read))


def _called(name: str, read: Read, options: Mapping[str, Any]) -> Iterator[Any]:
    """What a plug-in's function yields. Raises: DataError in place of whatever it raises."""
    try:
        yield from read(**options)
    except DptuneError:
        raise
    except (Exception, SystemExit) as error:  # whatever a plug-in may raise, or end the process by
        # Not the message of the exception, which may hold a record.
        own, lines = inspect.getsourcefile(read), traceback.extract_tb(error.__traceback__)
        line = next((one for one in reversed(lines) if one.filename == own), lines[-1])
        problem = f"source {name!r} failed ({type(error).__name__} at line {line.lineno} of {Path(line.filename).name})"
        fix = "fix that line, or the files that the options name"
        raise DataError(problem, fix=fix, file=own or read.__module__) from error


#: Options of benchmarks that say which rows are read, and so what one row is.
_CHOICES = ("task", "part", "half", "files", "block", "tokenizer", "tokenizer_revision")
#: Options of benchmarks that say what is written in the text of a row.
_WRITTEN = ("template", "separator")


def label_of(name: str, options: Mapping[str, Any]) -> str:
    """The name by which ledgers and reports call a function's records. Public.

    Of a plug-in it has its package, version and digest; of a benchmark its task and part, without which nobody knows
    whether a row is a phrase, a sentence or a paragraph; of another source of dptune's own the name alone.
    """
    if name in BENCHMARKS:
        read = chosen_rows(name, options)
        if (given := str(read.get("tokenizer", ""))) and Path(given).is_dir():
            read["tokenizer"] = Path(given).resolve().name  # no path of this machine
        chosen = ", ".join(f"{option} {value}" for option, value in read.items() if value)
        return f"benchmark {name} ({chosen})"
    if not is_outside(SOURCES[name].module):
        return f"source {name}"
    return f"source {name} of {', '.join(map(str, plugins_of([SOURCES[name].module])))}"


def chosen_rows(benchmark: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say which rows of a benchmark are read, such as its task and part, with their defaults."""
    read = {**_defaults(benchmark), **options}
    return {option: read[option] for option in _CHOICES if option in read}


def _made_by(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """See ``RecordSource.made_by``. A plug-in's options may name anything, and are left out."""
    read = {**_defaults(name), **options} if name in BENCHMARKS else {}
    return {"source": name, **{option: str(read[option]) for option in _WRITTEN if option in read}} if read else {}


def _defaults(name: str) -> dict[str, Any]:
    parameters = inspect.signature(BENCHMARKS[name]).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


SOURCES: dict[str, Source] = {
    "synthetic": Source(_synthetic, partial(_refuse_options, "synthetic"), _look_of_narratives, (RECORD, "patient")),
    "uci": Source(_uci, partial(_refuse_options, "uci"), _look_of_narratives, (RECORD, "patient")),
    "text": Source(_copy_text, _check_text, _look_at_text),
    **{name: _file_source(name) for name in WITH_COLUMNS},
    **{name: _of_function(name, read, rows=True) for name, read in BENCHMARKS.items()},
}
