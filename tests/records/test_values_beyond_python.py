"""Values that Arrow and NumPy hold and Python cannot are refused where they are read, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dptune.core.errors import DataError
from dptune.records.reading.read import read
from dptune.records.reading.record import unit_key
from dptune.records.reading.source import RecordSource


def far(kind: pa.DataType) -> pa.Array:
    number = {"date32[day]": 2**30, "date64[ms]": 2**50}.get(str(kind), 2**61)
    whole = pa.array([1, number], pa.int32() if kind == pa.date32() else pa.int64())
    return whole.view(kind)


def no_utf8(kind: pa.DataType) -> pa.Array:
    return pa.array([b"a", b"\xff"], pa.large_binary() if kind == pa.large_string() else pa.binary()).view(kind)


BEYOND = {
    "day": far(pa.date32()),
    "day in ms": far(pa.date64()),
    "time": far(pa.timestamp("us")),
    "time with a zone": far(pa.timestamp("ms", "UTC")),
    "no UTF-8": no_utf8(pa.string()),
    "no UTF-8, large": no_utf8(pa.large_string()),
}


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("beyond", BEYOND)
def test_a_value_that_python_cannot_hold_is_refused_where_it_is_read(
    beyond: str, as_file: bool, tmp_path: Path
) -> None:
    data: Any = pa.table({"text": ["one", "two"], "n": [1, 2], "x": BEYOND[beyond]})
    if as_file:
        pq.write_table(data, tmp_path / "a.parquet")
        data = tmp_path / "a.parquet"
    assert len(read(RecordSource(data, text="text", unit="n"))) == 2
    for options in ({"unit": "x"}, {"id": "x"}, {"text": "x"}, {"template": "{text} {x}"}):
        with pytest.raises(DataError, match=r"row [12], column 'x': holds (a date|text that is|datetime|date)"):
            read(RecordSource(data, **{"text": "text", **options} if "template" not in options else options))


def test_a_far_date_of_numpy_is_no_number() -> None:
    rows = [{"text": "a", "day": np.datetime64("20000-01-01")}]
    with pytest.raises(DataError, match="row 1, column 'day': holds a date outside the years"):
        read(RecordSource(rows, unit="day"))
    frame = pd.DataFrame({"text": ["a"], "day": np.array(["2024-01-05"], "datetime64[s]")})
    assert read(RecordSource(frame, unit="day"))[0].unit == unit_key("2024-01-05")


def test_times_at_the_calendars_ends_are_names() -> None:
    ends = [
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=5))),
        datetime.max.replace(tzinfo=UTC),
    ]
    assert len({unit_key(end) for end in ends}) == 3


@pytest.mark.parametrize(
    "error", [OverflowError("date value out of range"), UnicodeDecodeError("utf-8", b"", 0, 1, "")]
)
def test_rows_that_a_library_cannot_give_are_refused(error: Exception) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise error

    with pytest.raises(DataError, match=r"row 2: holds (a date outside|text that is not UTF-8)"):
        read(RecordSource(rows()))
