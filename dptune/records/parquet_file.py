"""The Parquet file of narratives, splits and canaries: columns record, unit and text, and metadata about the data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dptune.core.errors import DataError
from dptune.core.files import replacing
from dptune.records.reading.record import Chat, Content, Labelled, PromptTarget, Text

METADATA_KEY = b"dptune"
#: The forms that a record can have.
FORMS = ("text", "pair", "messages", "label")
_SPELT = {"pair": "prompts with targets", "messages": "chats", "label": "texts with labels"}
_BUFFER = 1 << 20  # bytes read ahead of a column
SCHEMA = pa.schema([("record", pa.int64()), ("unit", pa.int64()), ("text", pa.string())])


@dataclass(frozen=True)
class Records:
    """Records as columns of equal length. Private.

    Attributes:
        record: distinct numbers: encounter_id in the diabetes table, the place of a paragraph in a text file.
        unit: key of the unit that each record belongs to: the patient's number in the diabetes table, a hash of the
            paragraph in a text file. It follows from the unit alone, never from an order of appearance: a unit that
            left would change the others' keys, and their sides, clients and shards.
        text: content of each record.
        about: what the data is: at least source, synthetic and label.

    ``about["form"]``, one of ``FORMS`` and "text" if absent, says what ``text`` holds: a text, or JSON of prompt and
    target, of messages, or of a text and its label (``encode_content``).

    Rows that an auditor added (``canaries``) have negative numbers in both columns.
    """

    record: np.ndarray = field(repr=False)
    unit: np.ndarray = field(repr=False)
    text: pa.Array = field(repr=False)
    about: Mapping[str, Any]

    def equals(self, other: Records) -> bool:
        """Whether both hold the same rows in the same order, and say the same about them."""
        same_keys = np.array_equal(self.record, other.record) and np.array_equal(self.unit, other.unit)
        return same_keys and _metadata(self) == _metadata(other) and self.text.to_pylist() == other.text.to_pylist()

    def texts(self, purpose: str) -> list[str]:
        """The text of each record, for ``purpose``. Raises: DataError if they are anything else."""
        if (form := form_at(self.about)) != FORMS[0]:
            problem = f"{purpose} needs records of text, and these are {_SPELT[form]}"
            fix = "leave it out, or give the records as one text each (data.options: {text: ...} or {template: ...})"
            raise DataError(problem, fix=fix, file=str(self.about["label"]))
        return [str(text) for text in self.text.to_pylist()]


def secrets_in_records(about: Mapping[str, Any]) -> bool:
    """Whether the file's records carry secrets, which a permutation of them chose (``canaries.CARRIERS``)."""
    return "carrier" in about.get("canaries", {})


def form_at(about: Mapping[str, Any]) -> str:
    """The form of a file's records, one of ``FORMS``, by its ``Records.about``."""
    return str(about.get("form", FORMS[0]))


def encode_content(content: Content) -> str:
    """A record's content as the column ``text`` holds it. Never empty: an empty text marks a canary left out."""
    if isinstance(content, Text):
        return content.text
    whole = content.stored if isinstance(content, Chat) else list(vars(content).values())
    return json.dumps(whole, ensure_ascii=False, default=str)


def decode_content(text: str, form: str) -> Content:
    """The content of a record whose column ``text`` holds ``text``: the inverse of ``encode_content``."""
    if form == "messages":
        stored = json.loads(text)
        if isinstance(stored, dict):
            return Chat(tuple(stored["messages"]), stored["inputs"], stored["prompt"])
        return Chat(tuple(stored))
    if form == "label":
        return Labelled(*json.loads(text))
    return PromptTarget(*json.loads(text)) if form == "pair" else Text(text)


def read_records(path: Path) -> Records:
    """Read a whole file that :func:`write_records` wrote.

    Raises: DataError if it is absent, not Parquet, or lacks the columns or the metadata.
    """
    with _data_errors(path):
        table = pq.read_table(path)
        about = _about(table.schema)
        table = table.select(SCHEMA.names).cast(SCHEMA)
    table = table.combine_chunks()
    record, unit = (table[name].to_numpy() for name in ("record", "unit"))
    return Records(record, unit, table["text"], about)


def read_about(path: Path) -> dict[str, Any]:
    """Read ``Records.about`` alone, and no record. Raises: DataError as ``read_records``."""
    with _data_errors(path):
        return _about(pq.read_schema(path))


def read_batches(path: Path, columns: tuple[str, ...], rows: int = 4096) -> Iterator[pa.RecordBatch]:
    """Read some columns of a file in batches of at most ``rows`` records, so that memory does not grow with the file.

    Raises: DataError as ``read_records``, at the first batch that cannot be read.
    """
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    with _data_errors(path):
        # pre_buffer is off, because it reads a whole row group (a million records) into memory.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER)
        _about(file.schema_arrow)
        batches = file.iter_batches(batch_size=rows, columns=list(columns))
    with file:
        while True:
            with _data_errors(path):
                batch = next(batches, None)
                if batch is None:
                    return
                checked = batch.select(list(columns)).cast(schema)
            _refuse_gaps(checked, path)
            yield checked


def _refuse_gaps(batch: pa.RecordBatch, path: Path) -> None:
    for name in batch.schema.names:
        if batch.column(name).null_count:
            raise DataError("a value is missing", fix="run the stage that writes it again", file=path, column=name)


def _metadata(records: Records) -> str:
    return json.dumps(dict(records.about), sort_keys=True)


def _about(schema: pa.Schema) -> dict[str, Any]:
    return dict(json.loads((schema.metadata or {})[METADATA_KEY]))


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        problem = f"not a file of records ({type(error).__name__})"
        raise DataError(problem, fix="run the stage that writes it again", file=path) from None


def write_records(path: Path, records: Records) -> None:
    """Write ``records`` to ``path``; whole or not at all, mode 0600.

    A file that holds just these records stays as it is: finished runs are named by its digest, and another version of
    Arrow would write the same records in other bytes.
    """
    with suppress(DataError):
        if path.exists() and read_records(path).equals(records):
            return
    with replacing(path) as temporary:
        write_parquet(temporary, records)


def write_parquet(path: Path, records: Records) -> None:
    """Write ``records`` into the existing file ``path``, for callers that rename several files together."""
    metadata = {METADATA_KEY: _metadata(records)}
    columns = [records.record, records.unit, records.text]
    table = pa.table(columns, schema=SCHEMA.with_metadata(metadata))
    pq.write_table(table, path, compression="zstd")
