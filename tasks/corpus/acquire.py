"""DVC stage: put the table into data/raw, generated or real, a text file of the user's own, or a plug-in's texts."""

from __future__ import annotations

import logging
from pathlib import Path

from dptune.corpus.catalogue import acquire_source
from dptune.corpus.sources import acquire_synthetic, acquire_uci
from dptune.corpus.text import acquire_text
from tasks.paths import RAW
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def acquire() -> None:
    """Generate, fetch or copy what params.yaml names."""
    data = load_settings().data
    if data.source == "synthetic":
        file = acquire_synthetic(RAW, data.synthetic.encounters, data.synthetic.seed).table
    elif data.source == "uci":
        file = acquire_uci(RAW, data.uci_path, cached=_dvc_cache()).table
    elif data.source == "text":
        assert data.path is not None
        file = acquire_text(RAW, data.path)
    else:
        file = acquire_source(RAW, data.source, data.options)
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
