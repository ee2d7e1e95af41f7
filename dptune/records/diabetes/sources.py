"""Acquires the diabetes table: a synthetic one, or the real one from a path, DVC's cache or the UCI archive."""

from __future__ import annotations

import io
import logging
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, Any

import requests

from dptune.core.errors import DataError
from dptune.core.files import replacing, sha256, write_json
from dptune.core.progress import Meter
from dptune.records.diabetes.synthetic_cohort import Kind, generate_cohort, synthetic_ids_mapping
from dptune.records.diabetes.table import read_table
from dptune.records.published_files import in_cache

# Download of one file over HTTP, whole or an error.


_TIMEOUT = (10.0, 60.0)  # seconds to connect, seconds without a byte
_CHUNK = 1 << 16


def download(url: str, target: Path) -> None:
    """Stream ``url`` into ``target``, with a bar on a terminal and log lines elsewhere.

    Raises: DataError if the server cannot be reached, refuses, or sends less than it promised.
    """
    fix = "check the network and retry, or give uci.path a copy of the table (CSV or zip)"
    log.info("downloading %s", url)
    try:
        # Without "identity" the server may state the length of compressed bytes, and the check below would fail.
        headers = {"Accept-Encoding": "identity"}
        with requests.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
            response.raise_for_status()
            promised = int(response.headers.get("Content-Length") or 0)
            received = _stream(response, target, promised)
    except (requests.RequestException, ValueError) as error:
        raise DataError(f"download failed ({type(error).__name__}: {error})", fix=fix, file=url) from None
    if promised and received != promised:  # urllib3 2 raises by itself, urllib3 1 does not
        raise DataError(f"download stopped at {received} of {promised} bytes", fix=fix, file=url)


def _stream(response: requests.Response, target: Path, length: int) -> int:
    with target.open("wb") as file, Meter(f"downloading {target.name}", total=length or None, unit="B") as meter:
        for chunk in response.iter_content(_CHUNK):
            meter.update(meter.done + file.write(chunk))
        return meter.done


log = logging.getLogger(__name__)

MANIFEST_NAME = "source.json"
UCI_URL = "https://archive.ics.uci.edu/static/public/296/diabetes+130-us+hospitals+for+years+1999-2008.zip"
UCI_CSV_SHA256 = "0689e7ec031237dc63031b938805c48377748761a3b26acab621567afa24df97"
UCI_IDS_SHA256 = "f1bb82b471cb34649352597572c9b1fb00bd27f77b9f5a22a03dc3eb1039749e"
UCI_CSV_MD5 = "502f0cc004e4cf71536ec2e61596e42f"
UCI_IDS_MD5 = "e17b3b3ffa348d0a47a9bb3c92b218b3"
_CITATION = (
    "Clore, Cios, DeShazo, Strack (2014), Diabetes 130-US Hospitals for Years 1999-2008, "
    "UCI Machine Learning Repository, data set 296, doi 10.24432/C5230J"
)


@dataclass(frozen=True)
class Acquired:
    """The three files that an acquisition leaves in its directory."""

    table: Path
    ids_mapping: Path
    manifest: Path


def acquire_synthetic(directory: Path, encounters: int, seed: int, *, kind: Kind = "private") -> Acquired:
    """Generate a cohort into ``directory`` (see ``generate_cohort``); whole or not at all.

    Raises: ConfigError as ``generate_cohort``.
    """
    frame = generate_cohort(encounters, seed, kind=kind)
    about = {
        "source": "synthetic",
        "synthetic": True,
        "label": f"SYNTHETIC {kind} cohort ({encounters} encounters, seed {seed}); no real patient",
        "kind": kind,
        "seed": seed,
    }
    with _placing(directory, about) as (table, ids):
        frame.to_csv(table, index=False, lineterminator="\n")
        ids.write_text(synthetic_ids_mapping(), encoding="utf-8")
    return _acquired_paths(directory)


def acquire_uci(directory: Path, path: Path | None, dvc_cache: Path | None = None, url: str = UCI_URL) -> Acquired:
    """Put the real table into ``directory``; whole or not at all, and only with the known SHA-256 hashes.

    Takes the first that applies: ``path``, a CSV with IDs_mapping.csv beside it, or a zip of both; ``dvc_cache``, the
    root of DVC's cache, if it holds both files by their MD5; a download from ``url``.

    Raises: DataError if ``path`` is absent or lacks a file, a hash is wrong, or the download fails.
    """
    about = {
        "source": "uci",
        "synthetic": False,
        "label": "UCI Diabetes 130-US Hospitals 1999-2008: real encounters",
        "seed": None,
        "licence": "CC BY 4.0",
        "citation": _CITATION,
        "url": UCI_URL,
    }
    with _placing(directory, about) as (table, ids):
        if path is not None:
            copy_pair(path, table, ids)
        elif not (dvc_cache and _copy_cached(dvc_cache, table, ids)):
            _copy_downloaded(url, directory, table, ids)
        origin = path or url
        _check_hash(table, UCI_CSV_SHA256, origin, TABLE_NAME)
        _check_hash(ids, UCI_IDS_SHA256, origin, IDS_NAME)
    return _acquired_paths(directory)


@contextmanager
def _placing(directory: Path, about: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
    """Yield temporary paths for table and mapping; on leaving, validate both and put all three files in place."""
    final = _acquired_paths(directory)
    # The files appear in reverse order: the manifest last, when what it describes is in place.
    with (
        replacing(final.manifest) as manifest,
        replacing(final.ids_mapping) as ids,
        replacing(final.table) as table,
    ):
        yield table, ids
        rows = len(read_table(table, ids).frame)
        hashes = {TABLE_NAME: sha256(table), IDS_NAME: sha256(ids)}
        write_json(manifest, {**about, "rows": rows, "sha256": hashes})


def _acquired_paths(directory: Path) -> Acquired:
    return Acquired(directory / TABLE_NAME, directory / IDS_NAME, directory / MANIFEST_NAME)


def _copy_cached(cache: Path, table: Path, ids: Path) -> bool:
    found = {target: in_cache(cache, md5) for target, md5 in ((table, UCI_CSV_MD5), (ids, UCI_IDS_MD5))}
    for target, source in found.items():
        if source is None:
            name = TABLE_NAME if target == table else IDS_NAME
            log.info("DVC's cache %s lacks %s; taking both files from the UCI archive", cache, name)
            return False
        target.write_bytes(source.read_bytes())
    return True


def _copy_downloaded(url: str, directory: Path, table: Path, ids: Path) -> None:
    with TemporaryDirectory(prefix=".download-", dir=directory) as temporary:
        archive = Path(temporary) / "uci.zip"
        download(url, archive)
        try:
            copy_pair(archive, table, ids)
        except DataError as error:  # name the address, not a path that is about to vanish
            raise DataError(f"bad download ({error})", fix="retry, or give uci.path", file=url) from None


def _check_hash(path: Path, expected: str, origin: Path | str, name: str) -> None:
    actual = sha256(path)
    if actual != expected:
        problem = f"wrong {name}: its SHA-256 is {actual}, expected {expected}"
        raise DataError(problem, fix="take the unmodified file of UCI data set 296", file=origin)


# The table and its mapping in a folder, a zip, or a zip within a zip.


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
