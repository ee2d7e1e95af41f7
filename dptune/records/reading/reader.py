"""Opens a source: finds its format, and reads its rows with the reader of that format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from dptune.core.errors import DataError
from dptune.records.reading.fields import Row
from dptune.records.reading.formats import FORMATS
from dptune.records.reading.library import hub_rows, rows_of_library
from dptune.records.reading.rows import Rows, mappings, rows_like_first, rows_of_batch
from dptune.records.reading.source import Data, RecordSource, is_hub_name

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
        raise DataError("the file does not exist", fix=fix, file=path)
    found: Rows = FORMATS[source.format_of(path)].load()(source, path)
    return found


def _rows_from_python(data: Any, called: str) -> Rows:
    columns = getattr(data, "column_names", None)  # a datasets.Dataset has it; that library need not be installed
    if isinstance(columns, Mapping):
        fix = f"give one of its parts, such as data[{next(iter(columns), 'train')!r}]"
        raise DataError("is a DatasetDict", fix=fix, file=called)
    if isinstance(columns, list) and not isinstance(data, pa.Table):  # Arrow's tables have column_names too
        return rows_of_library(data, called)
    if isinstance(data, Mapping):
        fix = "give rows, such as [{'text': ...}], or pandas.DataFrame(records) of these columns"
        raise DataError("are columns, not rows", fix=fix, file=called)
    table = isinstance(data, pa.Table) or hasattr(data, "itertuples")  # a pandas.DataFrame, which need not be installed
    if not table:
        return rows_like_first(called, mappings(data, called))
    names = [str(name) for name in (data.column_names if isinstance(data, pa.Table) else data.columns)]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise DataError("the column is repeated", fix="name every column once", file=called, column=repeated)
    if not len(data):
        raise DataError("holds no records", fix="give one at least", file=called)
    return Rows(called, tuple(names), 1, True, enumerate(_rows_of_table(data, names), start=1))


def _rows_of_table(data: Any, names: list[str]) -> Iterator[Row]:
    """The rows of an Arrow table, or of a data frame without its index."""
    if isinstance(data, pa.Table):
        for batch in data.to_batches():
            yield from rows_of_batch(batch)
    else:
        for values in data.itertuples(index=False, name=None):
            yield dict(zip(names, values, strict=True))
