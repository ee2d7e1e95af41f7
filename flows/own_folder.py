"""Where a flow's lists and report lie: those of the workspace, which `make repro` wrote, are of params.yaml alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from dptune.files import private_directory, write_text
from flows.names import grid_name
from tasks.paths import DATA, EXPERIMENT, REPORTS
from tasks.settings.params import Settings, load_settings

#: The sections that a study reads; others make no other study.
_READ = ("plugins", "data", "task", "canaries", "pretrain", "lora", "training", "mechanisms", "experiment", "audit")
_MOST = 60  # characters: each may take four bytes of the 255 that a folder's name may have


def folder_of(overrides: dict[str, Any] | None = None, params: Path = Path("params.yaml")) -> Path:
    """The folder for what runs with these overrides: data, or one of data/reports for what the file does not say."""
    settings = load_settings(params, overrides)
    if (digest := _digest(settings)) == _digest(load_settings(params)):
        return DATA
    words = re.sub(r"[^\w.]+", "-", grid_name(settings))[:_MOST].strip("-.")
    return private_directory(REPORTS) / f"{words}-{digest[:6]}"


def audit_folder_of(overrides: dict[str, Any]) -> Path:
    """The folder of an audit with these overrides. If they change ``audit``, it is one of its own, with the list of the
    cells that the other overrides trained.
    """
    folder = folder_of(overrides)
    trained = folder_of({section: value for section, value in overrides.items() if section != "audit"})
    listed = trained / EXPERIMENT.name
    if folder == trained or not listed.exists():
        return folder
    own = folder.with_name(f"{folder.name}-audit")  # in ``folder`` lies the list of a study with these overrides
    write_text(own / EXPERIMENT.name, listed.read_text(encoding="utf-8"))
    return own


def _digest(settings: Settings) -> str:
    content = settings.model_dump(mode="json", include=set(_READ))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
