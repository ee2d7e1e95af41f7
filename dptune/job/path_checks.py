"""Checks a run's paths within a second, before torch is imported and before anything is read."""

from __future__ import annotations

from glob import escape
from pathlib import Path
from typing import Literal, cast, get_args

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import POINTER, sha256, why_unreadable
from dptune.privacy.certificate import FILE as CERTIFICATE
from dptune.privacy.run_folder import RunFolder
from dptune.records.reading.source import RecordSource, is_hub_name
from dptune.training.models.model_names import ADAPTER, GGUF, is_packaged, revision_of

#: Files that transformers opens of a checkpoint's folder beside its weights, where it has them.
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
#: What a folder of ``dptune tune`` holds.
Kind = Literal["run", "search"]


def check_model(source: str, revision: str | None) -> str:
    """The source of a model. Raises: ConfigError for a path that is no checkpoint, or a hub id without its commit."""
    if is_packaged(source):
        revision_of(source, revision)
        return source
    path = Path(source).expanduser()
    if path.suffix == GGUF and path.exists():
        if what := why_unreadable(path):
            raise ConfigError("model.source", f"{path} {what}", fix="copy or download it again")
        return str(path)
    if path.is_dir():
        config = path / "config.json"
        if (what := why_unreadable(config)) == "is missing" and (path / ADAPTER).is_file():
            problem = f"{source!r} is an adapter, not a model: it holds {ADAPTER} and no config.json"
            raise ConfigError("model.source", problem, fix="give the model that it was tuned on")
        if what == "is missing":
            problem = f"{source!r} holds no config.json, so it is not a checkpoint"
            raise ConfigError("model.source", problem, fix="give the folder that save_pretrained wrote")
        for name in MODEL_FILES:
            file = path / name
            if (what := why_unreadable(file)) and what != "is missing":
                fix = "run `git lfs pull` in its clone" if POINTER in what else "copy or download it again"
                raise ConfigError("model.source", f"{file} {what}", fix=fix)
        return str(path)
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        problem, fix = f"{source!r} is not a folder, or a GGUF file", "check the path of the checkpoint"
        raise ConfigError("model.source", problem, fix=fix)
    revision_of(source, revision)
    return source


def check_data(source: RecordSource) -> None:
    """Check the path of the records. Raises: DataError if there is no such file; ConfigError for an unknown ending."""
    for data in (source.data, source.public):
        if not isinstance(data, str | Path) or is_hub_name(source, data):
            continue
        if not Path(data).exists():
            raise DataError("the file does not exist", fix="check the path", file=data)
        source.format_of(Path(data))


def check_folder(folder: Path, kind: Kind = "run") -> None:
    """Check the folder of a run or a search. Raises: ConfigError if it is a file, or holds something else."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("out", f"{folder} is a file", fix="give a new folder, or the folder of a run to continue")
    files = RunFolder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (files.cell.exists() or files.lock.exists()):
        fix = "give a new folder, or the folder of a run to continue"
        raise ConfigError("out", f"{folder} holds files, but no run of dptune tune", fix=fix)
    other: Kind = "run" if kind == "search" else "search"
    if kind_of(files) == other:
        problem = f"{folder} belongs to a {other}, whose ledger, weights and card a {kind} would mix with its own"
        raise ConfigError("out", problem, fix="give another folder, or put this one away by `dptune set-aside`")


def kind_of(folder: RunFolder) -> Kind | None:
    """What ``dptune tune`` began in a folder; None where it began nothing there. Raises: DamagedFileError."""
    cell = folder.settings
    if (kind := cell.get("kind")) in get_args(Kind):
        return cast(Kind, kind)
    certified = (folder.path / CERTIFICATE, folder.adapter / CERTIFICATE, folder.searching)
    if "search" in cell or any(path.exists() for path in certified):
        return "search"
    return "run" if "run_id" in cell or folder.ledger.exists() else None


def check_new_file(out: Path) -> None:
    """Check where sampled texts go. Raises: ConfigError if they or their card exist, or the ending is another.

    A card alone, of texts that a killed process left under a temporary name, is in nobody's way: it is written anew.
    """
    if out.suffix != ".jsonl":
        raise ConfigError(
            "out", f"{out} does not end in .jsonl, by which the file is read", fix=f"use {out.stem}.jsonl"
        )
    for path in (out, card_beside(out)):
        if (path.exists() or path.is_symlink()) and not (path != out and _is_orphan(path, out)):
            raise ConfigError("out", f"{path} exists", fix="give another name, or move it away")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError("out", f"{parent} is not a folder", fix="give the path of a new file")


def _is_orphan(card: Path, out: Path) -> bool:
    """Whether a card tells of texts that never got their name, which the killed process's file beside it shows."""
    if out.exists() or not card.is_file():
        return False
    said = card.read_text(encoding="utf-8", errors="replace")
    left = out.parent.glob(f".{escape(out.name)}.*.partial")
    return any(f"SHA-256 {sha256(path)}" in said for path in left if path.is_file())


def card_beside(out: Path) -> Path:
    """The card of sampled texts."""
    return out.with_suffix(".md")
