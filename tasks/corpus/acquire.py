"""DVC stage: put the data of the chosen source into data/raw."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from dptune.records.catalogue import find_source
from tasks.paths import RAW, RAW_EVAL
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def acquire() -> None:
    """Generate, download or copy the data of the source that params.yaml names."""
    data = load_settings().data
    cached = _dvc_cache() if data.source == "uci" else None
    found = find_source(data.source)
    file = found.acquire(RAW, data.settings_of_source(cached))
    shutil.rmtree(RAW_EVAL, ignore_errors=True)
    if data.parts is not None:
        found.acquire(RAW_EVAL, data.settings_of_part(data.parts.eval))
    logging.getLogger(__name__).info("%s: %s", file, data.source)


def _dvc_cache() -> Path | None:
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    try:
        return Path(Repo().cache.local.path).parents[1]
    except NotDvcRepoError:
        return None


if __name__ == "__main__":
    run_stage(acquire)
