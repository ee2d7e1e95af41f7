"""Files that DVC tracks and that are in its cache, but not checked out: found by the checksum in their ``.dvc`` file.

Reads DVC's files itself, for the library does without DVC.
"""

from __future__ import annotations

import configparser
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dptune.errors import DataError

_DIRECTORY = ".dir"


@dataclass(frozen=True)
class CachedFile:
    """A file in DVC's cache, whose content has the checksum that its ``.dvc`` file states.

    Attributes:
        name: its path within the folder that DVC tracks; "." where that is the file itself.
        place: where its content lies.
    """

    name: str
    place: Path


def in_cache(cache: Path, checksum: str) -> Path | None:
    """The file with this MD5 in a cache of DVC 3 or DVC 2; None if there is none."""
    places = (cache / "files" / "md5" / checksum[:2] / checksum[2:], cache / checksum[:2] / checksum[2:])
    return next((place for place in places if place.is_file()), None)


def cached_files(path: Path) -> list[CachedFile]:
    """The file, or the files of the folder, that ``path`` would be after ``dvc checkout``; empty if DVC has none of it.

    Raises: DataError for a ``.dvc`` file that cannot be read, or a cached file with another checksum.
    """
    path = path.absolute()
    for tracked in (path, *path.parents):
        note = tracked.parent / f"{tracked.name}.dvc"
        if note.is_file() and (cache := _cache_of(note)):
            within = path.relative_to(tracked).as_posix()
            return [file for file in _files(note, cache) if PurePosixPath(file.name).is_relative_to(within)]
    return []


def _files(note: Path, cache: Path) -> Iterator[CachedFile]:
    try:
        out = yaml.safe_load(note.read_text(encoding="utf-8"))["outs"][0]
        checksum = str(out["md5"])
        if not checksum.endswith(_DIRECTORY):
            yield from _checked(".", checksum, cache)
            return
        listing = in_cache(cache, checksum)
        for entry in json.loads(listing.read_text(encoding="utf-8")) if listing else []:
            yield from _checked(str(entry["relpath"]), str(entry["md5"]), cache)
    except (yaml.YAMLError, ValueError, KeyError, IndexError, TypeError, OSError) as error:
        problem = f"is no file of DVC that says what it tracks ({type(error).__name__})"
        raise DataError(problem, fix="run dvc checkout, or give the file itself", file=note) from None


def _checked(name: str, checksum: str, cache: Path) -> Iterator[CachedFile]:
    place = in_cache(cache, checksum)
    if place is None:
        return
    if hashlib.md5(place.read_bytes(), usedforsecurity=False).hexdigest() != checksum:
        raise DataError("has another MD5 than its name", fix="remove it, and run dvc fetch", file=place)
    yield CachedFile(name, place)


def _cache_of(note: Path) -> Path | None:
    """The cache of the repository that a ``.dvc`` file lies in, as the repository's own configuration says."""
    root = next((folder / ".dvc" for folder in note.parents if (folder / ".dvc").is_dir()), None)
    if root is None:
        return None
    config: Any = configparser.ConfigParser(interpolation=None)
    config.read([root / "config", root / "config.local"], encoding="utf-8")  # the last one decides
    return root / config.get("cache", "dir", fallback="cache")
