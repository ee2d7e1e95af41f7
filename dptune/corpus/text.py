"""Records from a user's text file: one paragraph each, or one line each where no line is empty."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa

from dptune.corpus.narratives import check_files, check_rows, read_source
from dptune.corpus.reading.formats import FORMATS
from dptune.corpus.reading.opening import rows_of
from dptune.corpus.reading.source import RecordSource
from dptune.corpus.records import Records, write_records
from dptune.errors import DataError
from dptune.files import replacing, sha256, write_json

SOURCE, TEXT_NAME, MANIFEST_NAME = "text", "corpus.txt", "source.json"
#: Sources of one's own files, whose records are numbered by their places in them.
OWN_FILES: tuple[str, ...] = tuple(FORMATS)
_FEWEST = 10


def acquire_text(directory: Path, path: Path) -> Path:
    """Copy a text file into ``directory`` with a description beside it; whole or not at all. Returns the copy.

    Raises: DataError as ``read_paragraphs``, and for NUL bytes, content that looks like a table or JSONL, and
        paragraphs that may have joined records; ConfigError for a file whose ending is that of a table or JSONL.
    """
    rows = len(read_paragraphs(path))
    rows_of(RecordSource(path, format="text"), path)
    about = {"source": SOURCE, "synthetic": False, "label": f"text file {path.name}, the user's own"}
    with replacing(directory / MANIFEST_NAME) as manifest, replacing(directory / TEXT_NAME) as text:
        text.write_bytes(path.read_bytes())
        write_json(manifest, {**about, "rows": rows, "sha256": {TEXT_NAME: sha256(text)}})
    return directory / TEXT_NAME


def write_corpus(directory: Path, texts: Sequence[str], label: str) -> Path:
    """Write texts into ``directory`` in the form of ``acquire_text``; whole or not at all. Returns the file.

    White space within a text becomes single spaces.

    Raises: DataError naming the first element that is no text or empty, or if there are fewer than ten.
    """
    for row, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            fix = "yield strings, or mappings from column to value from a @source(NAME, rows=True)"
            raise DataError(f"a {type(text).__name__} is no text", fix=fix, file=label, row=row)
        if not (text.split() and text.encode(errors="ignore").decode() == text):
            raise DataError("a record is no text", fix="yield non-empty strings of Unicode", file=label, row=row)
    if len(texts) < _FEWEST:
        raise DataError(f"has {len(texts)} texts, of {_FEWEST} at least", fix="yield more", file=label)
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
    """The file's paragraphs, each on one line.

    Raises: DataError if it is absent, not UTF-8, or has fewer than ten.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", fix="give data.path a text file", file=path) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = 1 + content[: error.start].count(b"\n")
        raise DataError("is not UTF-8", fix="convert the file to UTF-8", file=path, row=row) from None
    blocks = re.split(r"\n\s*\n", text.strip())
    if len(blocks) == 1:
        blocks = text.strip().splitlines()
    found = [" ".join(block.split()) for block in blocks if block.strip()]
    if len(found) < _FEWEST:
        problem = f"has {len(found)} paragraphs (or lines), of {_FEWEST} at least"
        raise DataError(problem, fix="put an empty line between records, or one record on every line", file=path)
    return found
