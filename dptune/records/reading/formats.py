"""Formats of a user's files, and kinds of files that are refused.

A new format needs a file with its reader, and an entry here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from dptune.core.errors import DataError

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
    "text": FileFormat("dptune.records.reading.text_files.text_rows", "text", (".txt", ".text", ".md")),
    "table": FileFormat("dptune.records.reading.table_file.table_rows", "a table", (".csv", ".tsv", ".parquet", ".pq")),
    "jsonl": FileFormat("dptune.records.reading.text_files.jsonl_rows", "JSON", (".jsonl", ".ndjson", ".json")),
    "datasets": FileFormat("dptune.records.reading.read.saved_rows", "a saved data set"),
}
ENDINGS: dict[str, Format] = {ending: name for name, form in FORMATS.items() for ending in form.endings}
#: The ending, behind another, of a file that is packed by gzip.
PACKED = ".gz"


def ending_of(path: Path) -> str:
    """The ending of a file that names its format, in lower case: of ``a.csv.gz`` that is ".csv"."""
    return (path.with_suffix("") if path.suffix.lower() == PACKED else path).suffix.lower()


# Kinds of files that an ending hides: archives, documents, and other formats of text. They are refused by name.


#: How files begin that are not text, as patterns.
_OTHERS = {
    rb"PK\x03\x04": "a spreadsheet or another zip archive",
    rb"\xd0\xcf\x11\xe0": "a spreadsheet or document of Office 97 (.xls, .doc)",
    rb"\x1f\x8b": "a gzip archive",
    rb"BZh[1-9]1AY&SY": "a bzip2 archive",
    rb"\xfd7zXZ\0": "an xz archive",
    rb"\x28\xb5\x2f\xfd": "a Zstandard archive",
    rb"\x04\x22\x4d\x18": "an LZ4 archive",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive",
    rb"%PDF": "a PDF",
    rb"\{\\rtf": "a document in RTF",
    rb"PAR1": "a Parquet file",
    rb"SQLite format 3": "an SQLite database",
    rb"ARROW1": "an Arrow file",
    rb"\x89HDF": "an HDF5 file",
    rb"\x93NUMPY": "an array of NumPy",
    rb"\x80[\x02-\x05]": "a pickle of Python",
    rb"(?i:\s*<(?:!doctype|html))": "a web page",
    rb"<\?xml": "XML",
}
#: Number of lines that are looked at to recognise a format of text, and the least number that are enough.
_LOOKED_AT, _ENOUGH = 50, 5
_PAIR = r"[\w -]+(?::|\s=)\s.*"
#: Formats of text by a pattern of their first lines.
_BEGINNINGS = {
    r"\s*\[\s*\{": "JSON",
    r"\s*\{\s*\"[^\"\n]*\"\s*:": "JSON",
    r"\s*\[[^\n]*\]\s*\n\s*\[[^\n]*\]\s*\n": "JSON",
    r"\s*\{\s*'[^'\n]*'\s*:": "Python's way to print a dict",
    rf"(---\n|%YAML)?\s*- [\w-]+: .*\n  [\w-]+:|---\n{_PAIR}\n": "YAML",
    r"(?:--.*\n|/\*.*\n|\s)*(?:(?:CREATE|DROP) TABLE|INSERT INTO|(?:create table|insert into) \S+ ?(?:val|\())": "SQL",
    r".*\|.*\n[\s|+:-]*-{2,}[\s|+:-]*\n": "a Markdown table",
    r"\+[-=+]{3,}\+\n\|": "a table drawn with lines",
    r"\s*<(\w+)[^>\n]*>\s*\n\s*<\w+[^>\n]*>": "XML",
    rf"\[[^\]\n]+\]\n{_PAIR}\n": "a file of settings (INI or TOML)",
    r"\*{3,}.*\brow\b.*\*{3,}\n": "output of a database that lists rows one below the other",
    r"\\documentclass|\\begin\{document\}": "LaTeX",
    r"diff --git |--- \S.*\n\+\+\+ ": "a diff",
    r"From \S+@\S+ .*\n[\w-]+: ": "a mailbox",
    r"\ufeff?(?:WEBVTT|\d+\n\d\d:\d\d:\d\d[,.]\d{3} --> )": "a file of subtitles",
}
#: Formats of text by what each line of them begins with.
_LINES = {
    r"\s*\{.*\}\s*$": "JSONL",
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d": "a log",
    r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d ": "a log",
    r"\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4},? \d{1,2}:\d\d[^:]*(?::\d\d)?.{0,9}[^:]+: ": "a chat's export",
    r"\[?\d\d:\d\d(?::\d\d)?\]? ?<[^>]+> ": "a chat's export",
    r"(?:User|Human|Assistant|AI|Bot|System): ": "a chat's export",
    r"\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}:": "a log",
}


def refuse_binary(path: Path, content: bytes) -> None:
    """Raises: DataError for the content of a file that is not text, by what it is."""
    for begins, kind in _OTHERS.items():
        if re.match(begins, content):
            fix = "unpack it" if kind.endswith("archive") else "export its records as text, a table or JSONL"
            fix = f"add {PACKED} to its name, or unpack it" if "gzip" in kind else fix
            fix = "give it the ending .parquet" if "Parquet" in kind else fix
            raise DataError(f"is {kind}, not text", fix=fix, file=path)


def refuse_other_text(
    path: Path, lines: Sequence[str], read_as: str, *, unless: str = "", chosen: bool = False
) -> None:
    """Refuse a file whose first lines are another format of text.

    Args:
        read_as: what the file is read as, in words.
        unless: what reads it as text all the same, for the fix.
        chosen: whether that was said, so that only objects of JSON are refused.

    Raises: DataError naming the format.
    """
    begins = "\n".join([line.rstrip("\r\n") for line in lines[:_LOOKED_AT] if line.strip()]) + "\n"
    kind = next((kind for pattern, kind in _BEGINNINGS.items() if re.match(pattern, begins)), None)
    looked_at = begins.splitlines()
    if len(looked_at) >= _ENOUGH:
        kind = next((kind for way, kind in _LINES.items() if all(re.match(way, line) for line in looked_at)), kind)
    if kind is not None and (kind == "JSONL" or not chosen):
        fix = "use data.format jsonl" if "JSON" in kind else "export its records as text, a table or JSONL"
        problem = f"looks like {kind} and is read as {read_as}"
        raise DataError(problem, fix=fix + ("" if kind == "JSONL" else unless), file=path, row=1)
