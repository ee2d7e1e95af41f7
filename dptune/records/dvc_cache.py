"""Files that DVC tracks and that are in its cache, but not checked out: found by the checksum in their ``.dvc`` file.

Reads DVC's files itself, for the library does without DVC. Of DVC's configuration it knows the repository's own.
"""

from __future__ import annotations

import configparser
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from dptune.core.errors import DataError
from dptune.core.files import read_json

_DIRECTORY = ".dir"


@dataclass(frozen=True)
class CachedFile:
    """A file in DVC's cache, whose content has the checksum that DVC keeps of it.

    Attributes:
        name: its path within what was asked for; "." where that is the file itself.
        place: where its content lies.
    """

    name: str
    place: Path


def in_cache(cache: Path, checksum: str) -> Path | None:
    """The file with this MD5 in a cache of DVC 3 or DVC 2; None if there is none."""
    return next((place for place in _places(cache, checksum) if place.is_file()), None)


def cached_files(path: Path) -> list[CachedFile]:
    """The file, or the files of the folder, that ``path`` would be after ``dvc checkout``; empty if DVC tracks none.

    Raises: DataError for a file of DVC that cannot be read, for content that is in no cache, or has another checksum.
    """
    path = path.resolve()
    for tracked in (path, *path.parents):
        note = tracked.parent / f"{tracked.name}.dvc"
        root = _root_of(note)
        if root is not None and note.is_file():
            cache, within = _cache_of(root), PurePosixPath(path.relative_to(tracked).as_posix())
            try:
                known = list(_tracked(note, cache))
            except (yaml.YAMLError, ValueError, KeyError, IndexError, TypeError, OSError) as error:
                problem = f"is not a valid .dvc file ({type(error).__name__})"
                raise DataError(problem, fix="run dvc checkout, or give the file itself", file=note) from None
            asked = [(PurePosixPath(name), checksum) for name, checksum in known]
            found = [
                CachedFile(name.relative_to(within).as_posix(), place)
                for name, checksum in asked
                if name.is_relative_to(within) and (place := _checked(cache, checksum))
            ]
            if not found:
                problem = f"is tracked by DVC, and its content is not in the cache {cache}"
                raise DataError(problem, fix="run dvc pull, or give the file itself", file=path)
            return found
    return []


def _places(cache: Path, checksum: str) -> tuple[Path, Path]:
    """Where DVC 3 and DVC 2 keep the content of a checksum."""
    return cache / "files" / "md5" / checksum[:2] / checksum[2:], cache / checksum[:2] / checksum[2:]


def _tracked(note: Path, cache: Path) -> Iterator[tuple[str, str]]:
    """Name within what the ``.dvc`` file tracks, and MD5, of each file; none of a folder whose list is not cached."""
    checksum = str(yaml.safe_load(note.read_text(encoding="utf-8"))["outs"][0]["md5"])
    if not checksum.endswith(_DIRECTORY):
        yield ".", checksum
        return
    listing = in_cache(cache, checksum)
    for entry in read_json(listing, list, kind=list) if listing else []:
        yield str(entry["relpath"]), str(entry["md5"])


def _checked(cache: Path, checksum: str) -> Path | None:
    place = in_cache(cache, checksum)
    if place is None:
        return None
    content = place.read_bytes()
    # DVC 2 took the checksum of texts with the line ends of Unix.
    forms = [content] if place == _places(cache, checksum)[0] else [content, content.replace(b"\r\n", b"\n")]
    if checksum not in [hashlib.md5(form, usedforsecurity=False).hexdigest() for form in forms]:
        raise DataError("does not have the MD5 in its name", fix="take it out of the cache, then dvc pull", file=place)
    return place


def _root_of(note: Path) -> Path | None:
    """The folder .dvc of the repository that a file lies in."""
    return next((folder / ".dvc" for folder in note.parents if (folder / ".dvc").is_dir()), None)


def _cache_of(root: Path) -> Path:
    """The cache of a repository, as its own configuration says; the last file decides."""
    said = "cache"
    for file in (root / "config", root / "config.local"):
        config = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=("#",), strict=False)
        try:
            config.read(file, encoding="utf-8-sig")
        except (configparser.Error, ValueError) as error:
            problem = f"is not a valid DVC configuration ({type(error).__name__})"
            raise DataError(problem, fix="repair it, or give the data file itself", file=file) from None
        said = config.get("cache", "dir", fallback=said).strip("\"'")
    return root / said
