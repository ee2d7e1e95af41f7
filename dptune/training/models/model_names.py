"""How a base model is named: one of the hub with its commit, a folder without its path. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from dptune.core.errors import ConfigError

#: The file by which a folder is that of an adapter, and no model.
ADAPTER = "adapter_config.json"

_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_pinned(source: str, revision: str | None) -> None:
    """Raises: ConfigError unless ``source`` is a local directory, or ``revision`` the commit of a hub id."""
    if Path(source).is_dir() or (revision and _COMMIT.fullmatch(revision)):
        return
    known = f"its revision {revision!r} is not a commit" if revision else "no revision is given"
    raise ConfigError(
        "model.revision",
        f"{source!r} is not a local directory, and {known}",
        fix="pin the hub model to a 40-digit commit, or give the path of a checkpoint",
    )


def name_of(source: str) -> str:
    """A hub id, or the last part of a folder's path, so that no path of this machine is handed on."""
    return Path(source).resolve().name if Path(source).is_dir() else source
