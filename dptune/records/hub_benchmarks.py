"""Benchmarks as the hub has them: the same rows by the names of the hub's configurations, splits and columns.

Read with the ``datasets`` library, at a commit. Where the published file can be put together again, its SHA-256 is
checked as that of a file on the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dptune.core.errors import ConfigError, DataError
from dptune.records.reading.library import label_name, load_part
from dptune.records.reading.source import COMMIT

_SPLITS = {
    "train": "train",
    "dev": "validation",
    "test": "test",
    "dev_matched": "validation_matched",
    "dev_mismatched": "validation_mismatched",
}


def hub_rows(
    name: str,
    revision: str,
    part: str,
    columns: tuple[str, ...],
    configuration: str | None = None,
    named: str = "",
) -> Iterator[Mapping[str, Any]]:
    """The rows of a part, with values in plain Python; a label is its number.

    Args:
        name: of a data set on the hub, such as nyu-mll/glue.
        revision: its commit.
        columns: those that have to be there.
        named: a column of labels that are told by their names.

    Raises: ConfigError for a revision that is no commit, or without the library; DataError for a set that cannot be
        loaded or lacks a column.
    """
    if not COMMIT.fullmatch(revision):
        fix = "give the 40-digit commit of the data set"
        raise ConfigError("data.options", f"revision {revision!r} is not a commit", fix=fix)
    found = load_part(name, revision, _SPLITS[part], configuration)
    lacking = [column for column in columns if column not in found.column_names]
    if lacking:
        problem = f"has the columns {', '.join(found.column_names)}"
        raise DataError(problem, fix=f"name a data set with {', '.join(lacking)}", file=name)
    names = getattr(found.features.get(named), "names", None)
    for row in found.with_format(None):
        yield {**row, named: label_name(row[named], names)} if names else row
