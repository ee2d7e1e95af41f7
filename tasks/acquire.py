"""DVC stage: put the table into data/raw, generated or real."""

from __future__ import annotations

import logging
from pathlib import Path

from dptune.corpus.sources import acquire_synthetic, acquire_uci
from tasks.paths import RAW
from tasks.settings import load_settings
from tasks.stage import run_stage


def acquire() -> None:
    """Generate or fetch the table that params.yaml names."""
    data = load_settings().data
    if data.source == "synthetic":
        acquired = acquire_synthetic(RAW, data.synthetic.encounters, data.synthetic.seed)
    else:
        acquired = acquire_uci(RAW, data.uci_path, cached=_dvc_cache())
    logging.getLogger(__name__).info("%s: %s", acquired.table, data.source)


def _dvc_cache() -> Path | None:
    from dvc.exceptions import NotDvcRepoError
    from dvc.repo import Repo

    try:
        return Path(Repo().cache.local.path).parents[1]
    except NotDvcRepoError:
        return None


if __name__ == "__main__":
    run_stage(acquire)
