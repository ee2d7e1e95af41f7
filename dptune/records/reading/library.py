"""Rows of data sets of the ``datasets`` library, from a saved folder or the hub. The library is an extra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from dptune.core.errors import ConfigError, DataError
from dptune.records.reading.fields import Row
from dptune.records.reading.rows import Rows, mappings
from dptune.records.reading.source import RecordSource


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
    except IndexError:  # the library's own failure at a set without rows
        raise DataError("holds no records", fix="give one at least", file=path) from None
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        problem = f"is not a folder that the datasets library saved ({type(error).__name__})"
        raise DataError(problem, fix="save it again with save_to_disk", file=path) from None
    if isinstance(getattr(found, "column_names", None), Mapping):  # a DatasetDict
        if source.part not in found:
            other = next(iter(found), "train")
            fix = f"name another data.part, such as {other!r}, or give the part's own folder, {path / other}"
            raise DataError(f"has no part {source.part!r}", fix=fix, file=path)
        found = found[source.part]
    return rows_of_library(found, str(path))


def hub_rows(source: RecordSource, name: str) -> Rows:
    """Load one part of a hub data set, at the source's revision."""
    return rows_of_library(load_part(name, source.revision, source.part), name)


def load_part(name: str, revision: str | None, part: str, configuration: str | None = None) -> Any:
    """A part of a hub data set, as the library's own ``Dataset``.

    Raises: ConfigError without the library; DataError for a set that cannot be loaded.
    """
    try:
        return _library().load_dataset(name, configuration, revision=revision, split=part)
    except ConfigError:
        raise
    except Exception as error:  # whatever network, hub and library raise
        problem = f"cannot be loaded ({type(error).__name__})"
        raise DataError(problem, fix="check name, revision, data.part and network", file=name) from error


def rows_of_library(dataset: Any, file: str) -> Rows:
    """Rows of a ``datasets.Dataset`` in plain Python, whatever format it was given for a framework.

    Raises: DataError if it holds none.
    """
    if hasattr(dataset, "__len__") and not len(dataset):  # one that streams has none
        raise DataError("holds no records", fix="give one at least", file=file)
    features = getattr(dataset, "features", None) or {}
    labels = {column: feature.names for column, feature in features.items() if hasattr(feature, "names")}
    plain = dataset.with_format(None) if hasattr(dataset, "with_format") else dataset
    rows = mappings(plain, file)
    return Rows(file, tuple(dataset.column_names), 1, True, _with_label_names(rows, labels) if labels else rows)


def _with_label_names(rows: Iterator[tuple[int, Row]], labels: Mapping[str, list[str]]) -> Iterator[tuple[int, Row]]:
    """Rows with the names of labels, which the library stores as numbers; a number that names none is no label."""
    for number, row in rows:
        told = {name: row[name] for name in labels}
        yield number, {**row, **{name: label_name(label, labels[name]) for name, label in told.items()}}


def label_name(label: int | None, names: list[str]) -> str | None:
    """The name of a label that the library stores as a number; None for a number that names none."""
    return None if label is None or not 0 <= label < len(names) else names[label]
