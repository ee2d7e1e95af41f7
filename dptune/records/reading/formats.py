"""Formats of a user's files. A new format needs a file with its reader, and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

#: What ``data.format``, ``--format`` and ``data.source`` may say: the keys of ``FORMATS``.
Format = Literal["text", "table", "jsonl", "datasets"]


@dataclass(frozen=True)
class FileFormat:
    """A format of files, and the place of its reader.

    Attributes:
        reader: dotted name of the function from ``RecordSource`` and path to ``Rows``. A name, because importing all
            readers would slow down a command line that only lists formats.
        title: name of the format in messages.
        endings: endings of files that are read so without being told, in lower case; none for a format of folders.
    """

    reader: str
    title: str
    endings: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        """Import the reader's module, and return the reader."""
        module, _, function = self.reader.rpartition(".")
        found: Callable[..., Any] = getattr(import_module(module), function)
        return found


FORMATS: dict[Format, FileFormat] = {
    "text": FileFormat("dptune.records.reading.text_file.text_rows", "text", (".txt", ".text", ".md")),
    "table": FileFormat("dptune.records.reading.table_file.table_rows", "a table", (".csv", ".tsv", ".parquet", ".pq")),
    "jsonl": FileFormat("dptune.records.reading.jsonl_file.jsonl_rows", "JSON", (".jsonl", ".ndjson", ".json")),
    "datasets": FileFormat("dptune.records.reading.library.saved_rows", "a saved data set"),
}
ENDINGS: dict[str, Format] = {ending: name for name, form in FORMATS.items() for ending in form.endings}
#: The ending, behind another, of a file that is packed by gzip.
PACKED = ".gz"


def ending_of(path: Path) -> str:
    """The ending of a file that names its format, in lower case: of ``a.csv.gz`` that is ".csv"."""
    return (path.with_suffix("") if path.suffix.lower() == PACKED else path).suffix.lower()
