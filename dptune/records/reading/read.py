"""Reads all records of a source, and deals them to the sides of the split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dptune.core.errors import ConfigError, DataError
from dptune.records.reading.fields import RecordMaker, Row
from dptune.records.reading.findings import Finding
from dptune.records.reading.formats import FORMATS
from dptune.records.reading.record import Record, fingerprint
from dptune.records.reading.rows import Rows, checked, mappings, rows_like_first, rows_of_batch
from dptune.records.reading.source import Data, Fractions, RecordSource, is_hub_name
from dptune.records.splits import sides_of

Records = tuple[Record, ...]


@dataclass(frozen=True)
class Sides:
    """All records that a run reads. Private, but for ``public``.

    Attributes:
        train, eval, test: records of each side of the split; a side that is not asked for is empty.
        public: records of nobody.
        way: how the train side's texts were made of rows, one of ``fields.WAYS``; empty where nobody said.
        findings: what was perhaps meant otherwise, with counts. Private.
        unread: names of the columns of which nothing was made, though nobody chose the columns of the record.
        unread_later: such columns that the first row lacks.
    """

    train: Records = field(repr=False)
    eval: Records = field(default=(), repr=False)
    test: Records = field(default=(), repr=False)
    public: Records = field(default=(), repr=False)
    way: str = ""
    findings: tuple[Finding, ...] = field(default=(), repr=False)
    unread: tuple[str, ...] = ()
    unread_later: tuple[str, ...] = ()

    @property
    def shared_units(self) -> int:
        """Units of which train and another side hold records; none where the split is by fractions."""
        trained = {record.unit for record in self.train}
        return len(trained & {record.unit for side in (self.eval, self.test) for record in side})

    @property
    def fingerprint(self) -> str:
        """A digest by which a register recognises these records, however they were split. Private."""
        return fingerprint((*self.train, *self.eval, *self.test))


def read(source: RecordSource, data: Data | None = None, *, public: bool = False) -> Records:
    """Every record of ``data`` (None: of ``source.data``), in order and in memory.

    Args:
        public: whether these are records of nobody, which need no column of units or ids.

    Raises: ConfigError for options that do not fit the data; DataError naming file, row, column and fix.

    Example:
        >>> from dptune.records.reading.read import read
        >>> from dptune.records.reading.source import RecordSource
        >>> rows = [{"customer": n % 2, "text": f"Order {n} is late."} for n in range(4)]
        >>> records = read(RecordSource(rows, unit="customer"))
        >>> len(records), len({record.unit for record in records})
        (4, 2)
    """
    return read_and_say(source, data, public=public)[0]


def read_and_say(
    source: RecordSource, data: Data | None = None, *, public: bool = False
) -> tuple[Records, RecordMaker]:
    """What ``read`` returns, and the maker, which says how texts were made of rows. Raises as it does."""
    found = checked(source, rows_of(source, source.data if data is None else data))
    maker = RecordMaker(source, found.file, found.columns, found.first_row, found.table, public)
    records = tuple(maker.record(number, row) for number, row in found.rows)
    if found.open_end:
        named = {source.unit: maker.findings.units, source.label: maker.findings.labels}
        maker.findings.end_open(named.get(found.columns[-1]))
    return records, maker


def read_sides(source: RecordSource) -> Sides:
    """The records of all sides, and the public ones.

    Where the split is by fractions, a record's side is a keyed hash of its unit's key, and of nothing else.

    Raises: ConfigError and DataError as ``read``; ConfigError if a side that is asked for stays empty.

    Example:
        >>> from dptune.records.reading.read import read_sides
        >>> from dptune.records.reading.source import RecordSource
        >>> rows = [{"customer": n % 50, "text": f"Order {n} is late."} for n in range(200)]
        >>> sides = read_sides(RecordSource(rows, unit="customer"))
        >>> len(sides.train), len(sides.eval), len(sides.test), sides.shared_units
        (164, 12, 24, 0)
    """
    public = () if source.public is None else read(source, source.public, public=True)
    whole, maker = read_and_say(source)
    said: dict[str, Any] = {name: getattr(maker, name) for name in ("way", "unread", "unread_later")}
    findings = maker.findings.found()
    if isinstance(source.split, Fractions):
        dealt = _deal(source, source.split, whole, findings)
        return replace(dealt, public=public, findings=findings, **said)
    given = {name: getattr(source.split, name) for name in ("eval", "test")}
    others = dict[str, Any]()
    for name, data in given.items():
        if data is not None:
            others[name], maker = read_and_say(source, data)
            findings += tuple(replace(one, text=f"in {name}: {one.text}") for one in maker.findings.found())
    return Sides(whole, public=public, findings=findings, **said, **others)


def _deal(source: RecordSource, split: Fractions, whole: Records, findings: tuple[Finding, ...]) -> Sides:
    shares = {name: getattr(split, name) for name in ("train", "eval", "test")}
    asked: Mapping[str, float] = {name: share for name, share in shares.items() if share}
    keys = np.array([record.unit for record in whole], dtype=np.int64)
    sides = sides_of(keys, split.seed, "unit" if source.unit else "record", asked)
    for name, rows in sides.items():
        if not len(rows):
            few, fix = len(np.unique(keys)), "give more records, another share or another seed"
            problem = f"{few} distinct records (equal ones share a side) are too few: side {name} would be empty"
            if source.unit:
                problem = f"{few} units of {len(whole)} records are too few: side {name} would be empty"
            elif len(whole) == 1:
                fix = f"separate the records, or {fix}"
            if source.unit and few * 4 < len(whole):  # the column tells nobody apart, or a program rounded it
                said = "".join(f". {one.advice}" for one in findings if one.name.startswith("unit_"))
                problem, fix = (
                    f"column {source.unit!r}: {problem}{said}",
                    f"name a column that tells people apart, or {fix}",
                )
            raise ConfigError("data.split", problem, fix=fix)
    dealt = {name: tuple(whole[row] for row in rows) for name, rows in sides.items()}
    return Sides(dealt["train"], eval=dealt.get("eval", ()), test=dealt.get("test", ()))


# A source is opened: its format is found, and its rows are read with the reader of that format.


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


# Rows of data sets of the ``datasets`` library, from a saved folder or the hub. The library is an extra.


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
