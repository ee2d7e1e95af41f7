"""The table and its mapping out of whatever they come in: a folder, a zip, or a zip within a zip."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from dptune.errors import DataError

TABLE_NAME = "diabetic_data.csv"
_LARGEST_MEMBER = 256 << 20  # bytes; the real table has 19 MB
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)


def copy_pair(path: Path, table: Path, ids: Path) -> None:
    """Copy diabetic_data.csv and IDs_mapping.csv (any case) from ``path`` to ``table`` and ``ids``.

    ``path`` is the CSV, with the mapping beside it, or a zip that holds both at any depth.

    Raises: DataError if ``path`` is absent, a bad zip, or lacks one of the files.
    """
    if not path.is_file():
        raise DataError("no such file", fix="give the path of the UCI zip or of its CSV", file=path)
    found = _from_zip(path) if zipfile.is_zipfile(path) else _from_folder(path)
    for target, name in ((table, TABLE_NAME), (ids, "IDs_mapping.csv")):
        if name.lower() not in found:
            fix = "put it beside the CSV" if path.suffix.lower() == ".csv" else "give the unmodified UCI zip"
            raise DataError(f"{name} is missing", fix=fix, file=path)
        target.write_bytes(found[name.lower()])


def _wanted(name: str) -> str | None:
    """Which of the two files ``name`` is, in lower case; UCI spells the mapping IDs_ and IDS_mapping.csv."""
    base = PurePosixPath(name).name.lower()
    return base if base in (TABLE_NAME, "ids_mapping.csv") else None


def _from_folder(path: Path) -> dict[str, bytes]:
    found = {TABLE_NAME: path.read_bytes()}  # the CSV itself may have any name
    for neighbour in sorted(path.parent.iterdir()):
        if _wanted(neighbour.name) == "ids_mapping.csv":
            found["ids_mapping.csv"] = neighbour.read_bytes()
    return found


def _from_zip(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with path.open("rb") as file:
            for name, content in _members(file, nested=True):
                found.setdefault(name, content)
    except _BAD_ZIP as error:
        problem = f"not a readable zip ({error})"
        raise DataError(problem, fix="fetch the zip again", file=path) from None
    return found


def _members(file: IO[bytes], nested: bool) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            inner = nested and member.filename.lower().endswith(".zip")
            name = _wanted(member.filename)
            if not (name or inner):
                continue
            if member.file_size > _LARGEST_MEMBER:
                raise zipfile.BadZipFile(f"{member.filename} would be {member.file_size} bytes")
            content = archive.read(member)
            if inner:
                yield from _members(io.BytesIO(content), nested=False)
            elif name:
                yield name, content
