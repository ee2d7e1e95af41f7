"""Records from a user's text file: one paragraph or one line each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa

from dptune.core.errors import DataError
from dptune.core.files import replacing, sha256, write_json
from dptune.records.diabetes.narratives import check_files, check_rows, read_source
from dptune.records.parquet_file import Records, write_records
from dptune.records.reading.read import read_and_say
from dptune.records.reading.report import as_text
from dptune.records.reading.source import RecordsAre, RecordSource

SOURCE, TEXT_NAME, MANIFEST_NAME = "text", "corpus.txt", "source.json"
_FEWEST = 10
_log = logging.getLogger(__name__)


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
