"""How a base model is named: by a hub id with its commit, a folder, a GGUF file, or an installed package that holds one
of the last two. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from dptune.core.errors import ConfigError
from dptune.training.models.model_packages import PREFIX, find_model, holds_model, is_packaged

#: The file by which a folder is that of an adapter, and no model.
ADAPTER = "adapter_config.json"

_COMMIT = re.compile(r"[0-9a-f]{40}")
#: The ending of a GGUF file.
GGUF = ".gguf"
#: Types of weights that hold the published numbers, or as good as.
_WHOLE = ("F16", "F32", "F64", "BF16")


def path_of(source: str) -> Path | None:
    """The folder or the GGUF file of a model; None of a hub id.

    Raises: ConfigError for a package that does not hold it.
    """
    if is_packaged(source):
        return find_model(source).path
    path = Path(source)
    return path if path.is_dir() or (path.suffix == GGUF and path.is_file()) else None


def revision_of(source: str, revision: str | None) -> str | None:
    """The revision of a model: the commit of a hub id, the version of a package; None of a folder or a GGUF file.

    Raises: ConfigError for a hub id without its commit, and for another version of a package than is installed.
    """
    if is_packaged(source):
        installed = find_model(source).version
        if revision not in (None, installed):
            problem = f"{source!r} is installed in version {installed}, and {revision!r} is asked for"
            raise ConfigError("model.revision", problem, fix="install that version, or leave the revision out")
        return installed
    if path_of(source) is not None or (revision and _COMMIT.fullmatch(revision)):
        return revision
    if source.endswith(GGUF):
        raise ConfigError("model.source", f"the file {source!r} does not exist", fix="check its path")
    if holds_model(source):
        problem = f"{source!r} is neither a folder nor a hub id with a commit, but an installed package of this name"
        raise ConfigError("model.source", f"{problem} holds a model", fix=f"write {PREFIX}{source}")
    known = f"its revision {revision!r} is not a commit" if revision else "no revision is given"
    raise ConfigError(
        "model.revision",
        f"{source!r} is not a local directory, and {known}",
        fix="pin the hub model to a 40-digit commit, or give the path of a checkpoint",
    )


def name_of(source: str) -> str:
    """A hub id, a package, or the last part of a path, so that no path of this machine is handed on."""
    return source if is_packaged(source) or path_of(source) is None else Path(source).resolve().name


def rounding(kind: str) -> str | None:
    """What a type of weights does to the published ones, in words; None where it rounds none of them.

    >>> rounding("Q4_1"), rounding("BF16")
    ('a 4-bit rounding (Q4_1) of the published weights', None)
    """
    if kind in _WHOLE:
        return None
    bits = re.search(r"\d+", kind)
    return f"a {f'{bits[0]}-bit ' if bits else ''}rounding ({kind}) of the published weights"
