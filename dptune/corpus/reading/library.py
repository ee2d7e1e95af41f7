"""Rows of data sets of the ``datasets`` library, from a saved folder or the hub. The library is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from dptune.corpus.reading.rows import Rows, mappings
from dptune.corpus.reading.source import RecordSource
from dptune.errors import ConfigError, DataError


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        fix = "pip install 'dptune[datasets]', or give the records as JSONL or Parquet"
        raise ConfigError("data.format", "the datasets library is not installed", fix=fix) from None
    return datasets


def saved_rows(source: RecordSource, path: Path) -> Rows:
    """What ``save_to_disk`` of the datasets library left in a folder."""
    try:
        found = _library().load_from_disk(str(path))
        if isinstance(getattr(found, "column_names", None), Mapping):
            found = found[source.part]
    except KeyError:
        raise DataError(f"has no part {source.part!r}", fix="name another data.part", file=path) from None
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        problem = f"is no folder that the datasets library saved ({type(error).__name__})"
        raise DataError(problem, fix="save it again with save_to_disk", file=path) from None
    return _rows_of_dataset(found, str(path))


def hub_rows(source: RecordSource, name: str) -> Rows:
    """Load one part of a hub data set, at the source's revision."""
    try:
        found = _library().load_dataset(name, revision=source.revision, split=source.part)
    except ConfigError:
        raise
    except Exception as error:  # whatever network, hub and library raise
        problem = f"cannot be loaded ({type(error).__name__})"
        raise DataError(problem, fix="check name, revision, data.part and network", file=name) from error
    return _rows_of_dataset(found, name)


def _rows_of_dataset(found: Any, file: str) -> Rows:
    if not len(found):
        raise DataError("holds no records", fix="give one at least", file=file)
    return Rows(file, tuple(found.column_names), 1, True, mappings(found, file))
