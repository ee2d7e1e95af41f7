"""Sources of the pipeline that are a user's own files: a table, JSONL, a text file, or a folder of ``datasets``.

``dptune.records.reading`` reads them; acquiring writes all records to one Parquet file, with a description beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import replacing, sha256, write_json
from dptune.core.settings import RECORD
from dptune.records.diabetes.narratives import check_files, check_rows, read_source
from dptune.records.parquet_file import Records, encode_content, read_records, write_parquet, write_records
from dptune.records.reading.fields import RecordMaker, note_of_unread
from dptune.records.reading.formats import FORMATS, Format
from dptune.records.reading.read import read, read_and_say, rows_of
from dptune.records.reading.record import Record, as_text, form_of
from dptune.records.reading.rows import checked
from dptune.records.reading.source import RecordsAre, RecordSource

_log = logging.getLogger(__name__)

#: Formats whose rows have columns; ``corpus.text`` copies texts.
WITH_COLUMNS: tuple[Format, ...] = tuple(name for name in FORMATS if name != "text")
FILE_NAME, MANIFEST_NAME = "records.parquet", "source.json"
#: Keys of ``data.options``: the fields of ``RecordSource`` that params.yaml sets nowhere else.
OPTIONS = tuple(
    one.name for one in fields(RecordSource) if one.name not in ("data", "format", "label", "unit", "public", "split")
)
_FEWEST = 10


def source_of(
    name: Format, path: Path, unit: str, options: Mapping[str, Any], label: str | None = None
) -> RecordSource:
    """The reader's description of the file; ``label`` is its column of labels, if it has one.

    Raises: ConfigError for an unknown option, or columns that conflict.
    """
    for option, value in options.items():
        if option not in OPTIONS or not isinstance(value, str):
            problem = (
                f"{option!r} is not an option of source {name}" if option not in OPTIONS else f"{option} is not a text"
            )
            raise ConfigError("data.options", problem, fix=f"its options are texts by name: {', '.join(OPTIONS)}")
    column = None if unit == RECORD else unit
    return RecordSource(str(path), format=name, unit=column, label=label, **options)


def form_at(source: RecordSource, *, public: bool = False) -> str:
    """The form of the records (one of ``records.FORMS``); reads the first record alone.

    Args:
        public: look at ``source.public``, whose records need no column of units.

    Raises: DataError naming file, row, column and fix if it cannot be read, or lacks a column.
    """
    found = checked(source, rows_of(source, source.public if public and source.public is not None else source.data))
    maker = RecordMaker(source, found.file, found.columns, found.first_row, found.table, public)
    number, row = next(found.rows)
    return form_of([maker.record(number, row)])


def acquire_file(
    directory: Path, name: Format, path: Path, unit: str, options: Mapping[str, Any], label: str | None = None
) -> Path:
    """Read every record of a file into ``directory``, with a description beside them; whole or not at all.

    Raises: ConfigError and DataError as ``reading.read``; DataError for fewer than ten records.
    """
    called = f"{name} {path.name}, the user's own"
    return write_found(directory, source_of(name, path, unit, options, label), name, called, path)


def write_found(directory: Path, source: RecordSource, name: Format, label: str, file: Path | str) -> Path:
    """Read every record of ``source`` into ``directory``, described by ``label``; ``file`` names it in messages.

    Raises: ConfigError and DataError as ``acquire_file``.
    """
    found, maker = read_and_say(source)
    doubts = (one.text for one in maker.findings.found())
    for note in (*note_of_unread((*maker.unread, *maker.unread_later)), *doubts):
        _log.warning("%s: %s", file, note)
    if len(found) < _FEWEST:
        raise DataError(f"has {len(found)} records, and needs at least {_FEWEST}", fix="give more", file=file)
    about = {"source": name, "synthetic": False, "label": label, "form": form_of(found)}
    with replacing(directory / MANIFEST_NAME) as manifest, replacing(directory / FILE_NAME) as records:
        write_parquet(records, as_records(found, about))
        write_json(manifest, {**about, "rows": len(found), "sha256": {FILE_NAME: sha256(records)}})
    return directory / FILE_NAME


def write_public(out: Path, source: RecordSource) -> None:
    """Write the records of nobody that ``source.public`` names, as the pipeline stores records.

    Raises: ConfigError and DataError as ``acquire_file``.
    """
    found = read(source, source.public, public=True)
    if len(found) < _FEWEST:
        raise DataError(
            f"has {len(found)} records, and needs at least {_FEWEST}", fix="give more", file=str(source.public)
        )
    name = Path(str(source.public)).name
    about = {"source": source.format, "synthetic": False, "label": f"{name}, the user's own public records"}
    write_records(out, as_records(found, about | {"form": form_of(found)}))


def as_records(found: tuple[Record, ...], about: Mapping[str, Any]) -> Records:
    """Records as columns: ``record`` is the row's number in the file, ``unit`` the key of the record's unit."""
    units = np.array([record.unit for record in found], dtype=np.int64)
    text = pa.array([encode_content(record.content) for record in found], pa.string())
    rows = np.array([record.row for record in found], dtype=np.int64)
    return Records(rows, units, text, about)


def write_acquired(directory: Path, out: Path) -> None:
    """Write what ``acquire_file`` left in ``directory`` as the records of the pipeline. Raises: DataError."""
    file, manifest = directory / FILE_NAME, directory / MANIFEST_NAME
    check_files(manifest, {FILE_NAME: file})
    records = read_records(file)
    check_rows(manifest, file, len(records.record))
    write_records(out, records)


# Records from a user's text file: one paragraph or one line each.


SOURCE, TEXT_NAME = "text", "corpus.txt"


def acquire_text(directory: Path, path: Path, records_are: RecordsAre | None = None) -> Path:
    """Write a text file's records into ``directory``; whole or not at all. Returns the file.

    Raises: DataError as ``write_corpus``, for what is not UTF-8, for content that looks like a table or JSONL, and
        where lines and paragraphs are different records and ``records_are`` does not say which; ConfigError for a file
        whose ending is that of a table or JSONL.
    """
    found, maker = read_and_say(RecordSource(path, format="text", records_are=records_are))
    for doubt in maker.findings.found():
        _log.warning("%s: %s", path, doubt.text)
    texts = [as_text(record) for record in found]
    return write_corpus(directory, texts, f"text file {path.name}, the user's own", str(path))


def write_corpus(directory: Path, texts: Sequence[str], label: str, called: str | None = None) -> Path:
    """Write texts into ``directory`` in the form of ``acquire_text``; whole or not at all. Returns the file.

    White space within a text becomes single spaces.

    Args:
        called: what messages call the texts' source; ``label`` where there is none.

    Raises: DataError naming the first element that is no text or empty, or if there are fewer than ten.
    """
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            fix = "yield strings, or mappings from column to value from a @source(NAME, rows=True)"
            raise DataError(f"a {type(text).__name__} is not a text", fix=fix, file=label, row=row)
        if not (text.split() and text.encode(errors="ignore").decode() == text):
            raise DataError("a record is not a text", fix="yield non-empty strings of Unicode", file=label, row=row)
    if len(texts) < _FEWEST:
        problem, fix = f"has {len(texts)} texts, and needs at least {_FEWEST}", "give more records"
        raise DataError(problem, fix=fix, file=called or label)
    about = {"source": SOURCE, "synthetic": False, "label": label, "rows": len(texts)}
    with replacing(directory / MANIFEST_NAME) as manifest, replacing(directory / TEXT_NAME) as file:
        file.write_text("".join(f"{' '.join(text.split())}\n\n" for text in texts), encoding="utf-8")
        write_json(manifest, {**about, "sha256": {TEXT_NAME: sha256(file)}})
    return directory / TEXT_NAME


def write_paragraphs(directory: Path, out: Path) -> None:
    """Write the paragraphs of the file that ``acquire_text`` left in ``directory`` as records.

    A paragraph's unit is a hash of its text; its place in the file would depend on the other paragraphs.
    """
    about = read_source(directory / MANIFEST_NAME)
    check_files(directory / MANIFEST_NAME, {TEXT_NAME: directory / TEXT_NAME})
    texts = read_paragraphs(directory / TEXT_NAME)
    check_rows(directory / MANIFEST_NAME, directory / TEXT_NAME, len(texts))
    persons = np.array([_number_of(text) for text in texts], dtype=np.int64)
    write_records(out, Records(np.arange(len(texts)), persons, pa.array(texts, pa.string()), about))


def _number_of(text: str) -> int:
    """The key of a text's unit: 63 bits of its hash, which fit an int64 column."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def read_paragraphs(path: Path) -> list[str]:
    """The paragraphs of a file of ``write_corpus``."""
    return path.read_text(encoding="utf-8").split("\n\n")[:-1]
