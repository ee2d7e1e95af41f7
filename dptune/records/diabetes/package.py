"""Takes the diabetes table and its mapping out of a folder, a zip, or a zip within a zip."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from dptune.core.errors import DataError

TABLE_NAME, IDS_NAME = "diabetic_data.csv", "IDs_mapping.csv"
_LARGEST_MEMBER = 128 << 20  # bytes; the real table has 19 MB
_LARGEST_TOTAL = 256 << 20  # bytes read from a zip in all, the zips within it included
_MOST_MEMBERS = 1000
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError)


def copy_pair(path: Path, table: Path, ids: Path) -> None:
    """Copy diabetic_data.csv and IDs_mapping.csv (any case) from ``path`` to ``table`` and ``ids``.

    ``path`` is the CSV, with the mapping beside it, or a zip that holds both at any depth.

    Raises: DataError if ``path`` is absent, a bad zip, or lacks one of the files.
    """
    if not path.is_file():
        raise DataError("no such file", fix="give the path of the UCI zip or of its CSV", file=path)
    found = _from_zip(path) if _is_zip(path) else _from_folder(path)
    for target, name in ((table, TABLE_NAME), (ids, IDS_NAME)):
        if name.lower() not in found:
            fix = "put it beside the CSV" if path.suffix.lower() == ".csv" else "give the unmodified UCI zip"
            raise DataError(f"{name} is missing", fix=fix, file=path)
        target.write_bytes(found[name.lower()])


def _match_name(name: str) -> str | None:
    """Match ``name`` with one of the two files; None for any other.

    Case is ignored, because UCI spells both IDs_mapping.csv and IDS_mapping.csv.
    """
    base = PurePosixPath(name).name.lower()
    return base if base in (TABLE_NAME, "ids_mapping.csv") else None


def _is_zip(path: Path) -> bool:
    """Whether a file begins as a zip does. A zip that was cut off still does; ``zipfile.is_zipfile`` says no to it."""
    with path.open("rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06") or zipfile.is_zipfile(path)


def _from_folder(path: Path) -> dict[str, bytes]:
    if (size := path.stat().st_size) > _LARGEST_MEMBER:
        raise DataError(f"has {size} bytes, of {_LARGEST_MEMBER} at most", fix="give the UCI zip or CSV", file=path)
    found = {TABLE_NAME: path.read_bytes()}  # the CSV itself may have any name
    for neighbour in sorted(path.parent.iterdir()):
        if _match_name(neighbour.name) == "ids_mapping.csv":
            found["ids_mapping.csv"] = neighbour.read_bytes()
    return found


def _from_zip(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with path.open("rb") as file:
            for name, content in _members(file, _Allowance(_LARGEST_TOTAL, _MOST_MEMBERS), open_archives=True):
                found.setdefault(name, content)
    except (*_BAD_ZIP, ValueError) as error:
        problem = f"not a readable zip ({error}): it may have been cut off"
        raise DataError(problem, fix="fetch the zip again", file=path) from None
    return found


@dataclass
class _Allowance:
    """How much may still be unpacked: bytes and members. Checked before reading, for a small zip can hold gigabytes."""

    size: int
    members: int

    def take(self, member: zipfile.ZipInfo) -> None:
        """Raises: BadZipFile if ``member`` is larger than what is left."""
        self.size -= member.file_size
        self.members -= 1
        if member.file_size > _LARGEST_MEMBER or self.size < 0 or self.members < 0:
            raise zipfile.BadZipFile(f"{member.filename!r} would take {member.file_size} bytes, beyond what is allowed")


def _members(file: IO[bytes], allowance: _Allowance, open_archives: bool) -> Iterator[tuple[str, bytes]]:
    """The two files, if the zip holds them. Each name is read once, and never beyond the size that the zip states."""
    with zipfile.ZipFile(file) as archive:
        seen: set[str] = set()
        for member in archive.infolist():
            inner = open_archives and member.filename.lower().endswith(".zip")
            name = _match_name(member.filename)
            if not (name or inner) or member.filename in seen:
                continue
            seen.add(member.filename)
            allowance.take(member)
            with archive.open(member) as opened:
                content = opened.read(member.file_size + 1)
            if inner:
                yield from _members(io.BytesIO(content), allowance, open_archives=False)
            elif name:
                yield name, content
