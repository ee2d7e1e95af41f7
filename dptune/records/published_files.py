"""Files of benchmarks as their authors published them: found in a folder or an archive, and checked by SHA-256."""

from __future__ import annotations

import configparser
import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import read_json
from dptune.records.reading.read import label_name, load_part
from dptune.records.reading.source import COMMIT

#: The variable that names the folder in which relative paths of benchmarks are looked for too.
FOLDER = "DPTUNE_BENCHMARKS"
#: SHA-256 of files of which one version exists.
KNOWN = {
    "trainset.csv": "f27d48df45815288ab15619d47a79028c300fbb7f42e373668aba0b98c1d57c6",
    "devset.csv": "fc26b78cdb849c80545f513b223d1e051138b43882eeb79e3eb153e689c864f9",
    "testset_w_refs.csv": "edc8db685e39bb9824d5bd70c18b1c9b0412d14b527aa960e2d1c8251ee15ccd",
    "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}


def file_of(source: str, files: Mapping[str, str], part: str) -> str:
    """The name of a part's file. Raises: ConfigError for a part that the source does not have."""
    if part not in files:
        raise ConfigError("data.options", f"{source} has no part {part!r} here", fix=f"use {', '.join(files)}")
    return files[part]


def place_of(path: str) -> Path:
    """A path as given, or in the folder that ``DPTUNE_BENCHMARKS`` names where it is not there, nor tracked by DVC."""
    given, folder = Path(path), os.environ.get(FOLDER)
    return given if given.exists() or not folder or cached_files(given) else Path(folder) / given


def read_published(path: str, name: str) -> str:
    """The content of a file of a folder or an archive; from DVC's cache, if DVC tracks it and has not checked it out.

    Raises: DataError if it is absent, or has another SHA-256 than the published one.
    """
    place = place_of(path)
    cached = [] if place.exists() else cached_files(place)
    try:
        if place.is_dir() or any(file.name != "." for file in cached):
            found = sorted(place.rglob(name)) or [
                file.place for file in cached if PurePosixPath(file.name).name == name
            ]
            if len(found) > 1:  # every task of GLUE has a train.tsv
                raise DataError(f"holds {len(found)} files {name}", fix="give the folder of one of them", file=place)
            content = found[0].read_bytes() if found else None
        else:
            with zipfile.ZipFile(cached[0].place if cached else place) as archive:
                inside = next((one for one in archive.namelist() if one.rpartition("/")[2] == name), None)
                content = None if inside is None else archive.read(inside)
    except (OSError, zipfile.BadZipFile) as error:
        problem = f"cannot be read ({type(error).__name__})"
        fix = f"give the published archive, or its unpacked folder; relative paths may lie in ${FOLDER}"
        raise DataError(problem, fix=fix, file=place) from None
    if content is None:
        raise DataError(f"holds no {name}", fix="give the published archive, or its unpacked folder", file=place)
    check_known(name, content, place)
    return content.decode("utf-8")


def check_known(name: str, content: bytes, place: Path | str) -> None:
    """Raise DataError if a file of which one version exists has another SHA-256."""
    digest = hashlib.sha256(content).hexdigest()
    if KNOWN.get(name, digest) != digest:
        problem = f"{name} has SHA-256 {digest}, and the published file {KNOWN[name]}"
        raise DataError(problem, fix="take the published file", file=place)


# The same rows as the hub has them, read with the datasets library at a commit.


_SPLITS = {
    "train": "train",
    "dev": "validation",
    "test": "test",
    "dev_matched": "validation_matched",
    "dev_mismatched": "validation_mismatched",
}


def hub_rows(
    name: str,
    revision: str,
    part: str,
    columns: tuple[str, ...],
    configuration: str | None = None,
    named: str = "",
) -> Iterator[Mapping[str, Any]]:
    """The rows of a part, with values in plain Python; a label is its number.

    Args:
        name: of a data set on the hub, such as nyu-mll/glue.
        revision: its commit.
        columns: those that have to be there.
        named: a column of labels that are told by their names.

    Raises: ConfigError for a revision that is no commit, or without the library; DataError for a set that cannot be
        loaded or lacks a column.
    """
    if not COMMIT.fullmatch(revision):
        fix = "give the 40-digit commit of the data set"
        raise ConfigError("data.options", f"revision {revision!r} is not a commit", fix=fix)
    found = load_part(name, revision, _SPLITS[part], configuration)
    lacking = [column for column in columns if column not in found.column_names]
    if lacking:
        problem = f"has the columns {', '.join(found.column_names)}"
        raise DataError(problem, fix=f"name a data set with {', '.join(lacking)}", file=name)
    names = getattr(found.features.get(named), "names", None)
    for row in found.with_format(None):
        yield {**row, named: label_name(row[named], names)} if names else row


# Files that DVC tracks and that are in its cache, but not checked out: found by the checksum in their ``.dvc`` file.
#
# Reads DVC's files itself, for the library does without DVC. Of DVC's configuration it knows the repository's own.


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
