"""Checks a run's paths within a second, before torch is imported and before anything is read."""

from __future__ import annotations

from pathlib import Path

from dptune.corpus.reading.source import RecordSource, is_hub_name
from dptune.errors import ConfigError, DataError
from dptune.privacy.run_folder import RunFolder
from dptune.training.pinned import check_pinned


def check_model(source: str, revision: str | None) -> str:
    """The source of a model. Raises: ConfigError for a path that is no checkpoint, or a hub id without its commit."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            problem = f"{source!r} holds no config.json, so it is no checkpoint"
            raise ConfigError("model.source", problem, fix="give the folder that save_pretrained wrote")
        return str(path)
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ConfigError("model.source", f"{source!r} is no folder", fix="check the path of the checkpoint's folder")
    check_pinned(source, revision)
    return source


def name_of(source: str) -> str:
    """A hub id, or the last part of a folder's path, so that no path of this machine is handed on."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def check_data(source: RecordSource) -> None:
    """Check the path of the records. Raises: DataError if there is no such file; ConfigError for an unknown ending."""
    for data in (source.data, source.public):
        if not isinstance(data, str | Path) or is_hub_name(source, data):
            continue
        if not Path(data).exists():
            raise DataError("there is no such file", fix="check the path", file=data)
        source.format_of(Path(data))


def check_folder(folder: Path) -> None:
    """Check the run's folder. Raises: ConfigError if it is a file, or holds something other than a run."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError("out", f"{folder} is a file", fix="give a new folder, or that of a run to go on with")
    files = RunFolder(folder)
    if folder.is_dir() and any(folder.iterdir()) and not (files.cell.exists() or files.lock.exists()):
        fix = "give a new folder, or that of a run to go on with"
        raise ConfigError("out", f"{folder} holds files and no run of dptune tune", fix=fix)


def check_new_file(out: Path) -> None:
    """Check where sampled texts go. Raises: ConfigError if they or their card exist, or the ending is another."""
    if out.suffix != ".jsonl":
        raise ConfigError(
            "out", f"{out} does not end in .jsonl, by which the file is read", fix=f"use {out.stem}.jsonl"
        )
    for path in (out, card_beside(out)):
        if path.exists() or path.is_symlink():
            raise ConfigError("out", f"{path} exists", fix="give another name, or move it away")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError("out", f"{parent} is no folder", fix="give the path of a new file")


def card_beside(out: Path) -> Path:
    """The card of sampled texts."""
    return out.with_suffix(".md")
