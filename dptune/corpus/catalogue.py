"""Sources of one's own, by name: functions that yield one text a record.

Their parameters are what ``data.options`` in params.yaml gives::

    @source("letters")
    def letters(folder: str, newest: int = 100) -> Iterator[str]: ...

They are registered by plug-ins (``dptune.plugins``): modules that are named, and entry points ``dptune.sources``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dptune.corpus.text import write_corpus
from dptune.errors import ConfigError, DataError, DptuneError
from dptune.plugins import load_installed, plugins_of

Source = Callable[..., Iterable[str]]
#: What dptune can acquire by itself.
BUILT_IN = ("synthetic", "uci", "text")
_SOURCES: dict[str, Source] = {}


def source(name: str) -> Callable[[Source], Source]:
    """Register a function that yields texts. Raises ConfigError if the name is taken."""

    def register(read: Source) -> Source:
        other = _SOURCES.get(name)
        if name in BUILT_IN or (other is not None and other.__module__ != read.__module__):
            raise ConfigError("plugins", f"source {name!r} of {read.__module__} exists already", fix="rename it")
        _SOURCES[name] = read
        return read

    return register


def find_source(name: str) -> Source:
    """A source of one's own. Raises: ConfigError if there is none of that name."""
    if name not in _SOURCES:
        load_installed("dptune.sources")
    if name not in _SOURCES:
        known = ", ".join([*BUILT_IN, *sorted(_SOURCES)])
        raise ConfigError("data.source", f"unknown source {name!r}", fix=f"use one of {known}, or name its plug-in")
    return _SOURCES[name]


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the source takes these options."""
    signature = inspect.signature(find_source(name))
    try:
        signature.bind(**options)
    except TypeError as error:
        problem = f"source {name!r} does not take them ({error})"
        raise ConfigError("data.options", problem, fix=f"its parameters are {signature}") from None


def acquire_source(directory: Path, name: str, options: Mapping[str, Any]) -> Path:
    """Write the texts of a source of one's own into ``directory``; whole or not at all. Returns the file.

    Raises: ConfigError as ``check_options``; DataError if it fails, yields no texts, or fewer than ten.
    """
    check_options(name, options)
    read = find_source(name)
    try:
        texts = list(read(**options))
    except DptuneError:
        raise
    except Exception as error:  # whatever a plug-in may raise
        problem = f"source {name!r} failed ({type(error).__name__}: {error})"
        raise DataError(problem, fix="mend it", file=inspect.getsourcefile(read) or read.__module__) from error
    by = ", ".join(map(str, plugins_of([read.__module__])))
    return write_corpus(directory, texts, f"source {name} of {by}")
