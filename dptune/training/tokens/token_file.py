"""The token file: a corpus as token ids, from which a run reads its records through a memory map. Private.

An Arrow IPC file; each of its batches holds the key of the record's unit, whether the record is absent (its text is
empty: an auditor's coin left it out), whether it was cut, and its token ids. It is written batch by batch, so that
memory does not grow with the corpus. An open file takes address space only; the kernel decides how many of its pages
are in memory.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dptune.core.errors import DataError
from dptune.core.files import locked, private_directory, replacing
from dptune.training.data import Tokens, encode

#: Part of the files' names. Raise it when the same text gets other ids, or the layout of the file changes.
FORMAT = 2
_METADATA_KEY = b"dptune"
_SCHEMA = pa.schema([("unit", pa.int64()), ("absent", pa.bool_()), ("cut", pa.bool_()), ("ids", pa.list_(pa.int32()))])


Encoding = tuple[list[NDArray[np.int32]], NDArray[np.bool_]]
Encoder = Callable[[pa.RecordBatch, Any], Encoding]


class MappedRows(Sequence[NDArray[np.int32]]):
    """Rows of a token file, read-only; a slice is another view of it."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        lists = [batch.column("ids") for batch in batches]
        self._offsets = [one.offsets.to_numpy() for one in lists]
        self._ids = [one.values.to_numpy() for one in lists]
        self._starts = [0, *accumulate(map(len, lists))]
        self._chosen = range(self._starts[-1])

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            view = object.__new__(MappedRows)
            view.__dict__ |= self.__dict__ | {"_chosen": self._chosen[index]}
            return view
        record = self._chosen[index]
        batch = bisect_right(self._starts, record) - 1
        place = record - self._starts[batch]
        start, end = self._offsets[batch][place : place + 2]
        return self._ids[batch][start:end]


@dataclass(frozen=True)
class Corpus:
    """An open token file.

    Attributes:
        tokens: token ids of every record, mapped into memory.
        absent: (records,) records that the auditor's coin left out, or None if there is none.
    """

    tokens: Tokens
    absent: NDArray[np.bool_] | None = field(repr=False)
    _batches: list[pa.RecordBatch] = field(repr=False)

    @property
    def units(self) -> NDArray[np.integer[Any]]:
        """(records,) key of each record's unit, as int32 where all fit. Reads every row: call it only if needed."""
        columns = [batch.column("unit").to_numpy() for batch in self._batches if len(batch)]
        fits = all(column.min() >= -(2**31) and column.max() < 2**31 for column in columns)
        narrow = np.int32 if fits else np.int64
        return np.concatenate([np.zeros(0, narrow), *columns], dtype=narrow, casting="unsafe")


def open_or_tokenize(
    path: Path,
    batches: Callable[[], Iterable[pa.RecordBatch]],
    tokenizer: Any,
    max_length: int,
    encoder: Encoder | None = None,
) -> Corpus:
    """Open the corpus in ``path``, after tokenising it if the file is missing. Other processes wait meanwhile.

    Args:
        path: the file. Its name must depend on data, tokenizer, ``FORMAT`` and ``max_length``; its folder is made
            private.
        batches: returns record batches with columns unit and text, such as those of ``read_batches``.
        encoder: function of a batch and the tokenizer that returns the batch's rows and (records,) whether each was
            cut; None encodes the column text.

    Raises:
        ConfigError: ``max_length`` leaves nothing to predict.
        DataError: the file is torn or cannot be written, or the records cannot be read. Nothing half-written stays.
    """
    if not path.exists():
        private_directory(path.parent)
        with locked(path.with_name(f".{path.name}.lock"), wait=True):
            if not path.exists():
                _remove_abandoned(path)
                _write(path, batches(), tokenizer, max_length, encoder or partial(_encode_texts, max_length=max_length))
    return open_corpus(path)


def _remove_abandoned(path: Path) -> None:
    """Remove files that a killed process left half-written. Call under the lock, so that nobody is writing them."""
    for abandoned in path.parent.glob(f".{path.name}.*.partial"):
        abandoned.unlink(missing_ok=True)


def _write(path: Path, batches: Iterable[pa.RecordBatch], tokenizer: Any, max_length: int, encoder: Encoder) -> None:
    written = (_batch_of(batch, *encoder(batch, tokenizer)) for batch in batches)
    try:
        write(path, written, padding=tokenizer.pad_token_id, width=max_length)
    except OSError as error:
        problem = f"the token ids cannot be written ({error.strerror or type(error).__name__})"
        raise DataError(problem, fix="free space on its disk, or make its folder writable", file=path) from None
    pa.default_memory_pool().release_unused()


def write(path: Path, batches: Iterable[pa.RecordBatch], *, padding: int, width: int) -> None:
    """Write batches of ``token_batch``, completely or not at all, with mode 0600."""
    about = json.dumps({"padding": padding, "width": width}, sort_keys=True)
    schema = _SCHEMA.with_metadata({_METADATA_KEY: about})
    with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        for batch in batches:
            file.write_batch(batch)


def _encode_texts(batch: pa.RecordBatch, tokenizer: Any, max_length: int) -> Encoding:
    return encode(batch.column("text").to_pylist(), tokenizer, max_length)


def _batch_of(batch: pa.RecordBatch, rows: Sequence[NDArray[np.int32]], cut: NDArray[np.bool_]) -> pa.RecordBatch:
    absent = pc.equal(batch.column("text"), "").to_numpy(zero_copy_only=False)
    return token_batch(rows, batch.column("unit").to_numpy(), cut, absent)


def token_batch(
    rows: Sequence[NDArray[np.int32]],
    units: NDArray[np.int64],
    cut: NDArray[np.bool_] | None = None,
    absent: NDArray[np.bool_] | None = None,
) -> pa.RecordBatch:
    """Make a batch of a token file from records; by default none is cut or absent."""
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    ids = pa.ListArray.from_arrays(offsets, np.concatenate([np.zeros(0, dtype=np.int32), *rows]))
    nobody = np.zeros(len(rows), dtype=bool)
    flags = [pa.array(nobody if flag is None else flag) for flag in (absent, cut)]
    return pa.RecordBatch.from_arrays([pa.array(units), *flags, ids], schema=_SCHEMA)


def open_corpus(path: Path) -> Corpus:
    """Open a token file that was written before.

    Raises: DataError if it is absent, torn, or something else.
    """
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        about = json.loads((reader.schema.metadata or {})[_METADATA_KEY])
        padding, width = int(about["padding"]), int(about["width"])
        if not reader.schema.equals(_SCHEMA):
            raise KeyError("schema")
        batches = list(_read_batches(reader))
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        problem = f"is cut off, or not a file of token ids ({type(error).__name__})"
        raise DataError(problem, fix="remove it; the next run makes it again", file=path) from None
    cut = sum(pc.sum(batch.column("cut")).as_py() or 0 for batch in batches)
    tokens = Tokens(rows=MappedRows(batches), padding=padding, width=width, truncated=cut)
    return Corpus(tokens, _absent(batches), batches)


def _read_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        batch.validate()
        if any(column.null_count for column in (*batch.columns, batch.column("ids").values)):
            raise ValueError("nulls")
        yield batch


def _absent(batches: list[pa.RecordBatch]) -> NDArray[np.bool_] | None:
    if not any(pc.any(batch.column("absent")).as_py() for batch in batches):
        return None
    return np.concatenate([batch.column("absent").to_numpy(zero_copy_only=False) for batch in batches])
