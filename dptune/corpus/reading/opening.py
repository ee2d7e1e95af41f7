"""Opens a source: finds its format, and reads its rows with the reader of that format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dptune.corpus.reading.formats import FORMATS
from dptune.corpus.reading.library import hub_rows, rows_of_library
from dptune.corpus.reading.rows import Rows, mappings, rows_like_first
from dptune.corpus.reading.source import Data, RecordSource, is_hub_name
from dptune.errors import DataError

_PYTHON = "the records given from Python"


def rows_of(source: RecordSource, data: Data) -> Rows:
    """The rows of ``data``, read one by one as they are asked for.

    Raises: ConfigError for options that conflict or do not fit the data; DataError for a file that cannot be read, now
        or when a bad row is reached.
    """
    if not isinstance(data, str | Path):
        benchmark = source.made_by.get("source") if data is source.data else None
        return _rows_from_python(data, _PYTHON if benchmark is None else f"benchmark {benchmark}")
    if is_hub_name(source, data):
        return hub_rows(source, str(data))
    path = Path(data)
    if not path.exists():
        fix = "check the path; a data set of the hub needs data.revision"
        raise DataError("there is no such file", fix=fix, file=path)
    found: Rows = FORMATS[source.format_of(path)].load()(source, path)
    return found


def _rows_from_python(data: Iterable[Mapping[str, Any]], called: str) -> Rows:
    columns = getattr(data, "column_names", None)  # a datasets.Dataset has it; that library need not be installed
    if isinstance(columns, Mapping):
        fix = f"give one of its parts, such as data[{next(iter(columns), 'train')!r}]"
        raise DataError("is a DatasetDict", fix=fix, file=called)
    if isinstance(columns, list):
        return rows_of_library(data, called)
    return rows_like_first(called, mappings(data, called))
