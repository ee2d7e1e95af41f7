"""The Parquet file of narratives, splits and canaries: record, patient, text, and what the data is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dptune.errors import DataError
from dptune.files import replacing

METADATA_KEY = b"dptune"
SCHEMA = pa.schema([("record", pa.int64()), ("patient", pa.int64()), ("text", pa.string())])


@dataclass(frozen=True)
class Records:
    """``record`` (row of the table, from 0), ``patient`` (dense pseudonymous index) and ``text``, equally
    long, and ``about``: at least source, synthetic and label."""

    record: np.ndarray = field(repr=False)
    patient: np.ndarray = field(repr=False)
    text: pa.Array = field(repr=False)
    about: Mapping[str, Any]


def read_records(path: Path) -> Records:
    """Read a file that :func:`write_records` wrote.

    Raises: DataError if it is absent, not Parquet, or lacks the columns or the metadata.
    """
    try:
        table = pq.read_table(path)
        about = json.loads((table.schema.metadata or {})[METADATA_KEY])
        table = table.select(SCHEMA.names).cast(SCHEMA)
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        problem = f"not a file of narratives ({type(error).__name__})"
        raise DataError(problem, fix="run the stage that writes it again", file=path) from None
    table = table.combine_chunks()
    record, patient = (table[name].to_numpy() for name in ("record", "patient"))
    return Records(record, patient, table["text"], about)


def write_records(path: Path, records: Records) -> None:
    """Write ``records`` to ``path``; whole or not at all, mode 0600."""
    with replacing(path) as temporary:
        write_parquet(temporary, records)


def write_parquet(path: Path, records: Records) -> None:
    """Write ``records`` into the existing file ``path``, for callers that rename several files together."""
    metadata = {METADATA_KEY: json.dumps(dict(records.about), sort_keys=True)}
    columns = [records.record, records.patient, records.text]
    table = pa.table(columns, schema=SCHEMA.with_metadata(metadata))
    pq.write_table(table, path, compression="zstd")
