"""DVC stage: the experiment's public records, which validation, controllers and rehearsals may read at no cost."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from dptune.core.files import private_directory
from dptune.records.catalogue import find_source
from dptune.records.diabetes.narratives import PLAIN, write_narratives
from dptune.records.diabetes.sources import acquire_synthetic
from dptune.records.own_files import write_acquired, write_public
from tasks.paths import PUBLIC_VALIDATION
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def write_validation() -> None:
    """Write a benchmark's public part, the user's own public records (``data.public``), or synthetic narratives."""
    settings = load_settings()
    private_directory(PUBLIC_VALIDATION.parent)
    if settings.data.parts is not None:
        with TemporaryDirectory(prefix="dptune-") as work:
            find_source(settings.data.source).acquire(
                Path(work), settings.data.settings_of_part(settings.data.parts.public)
            )
            write_acquired(Path(work), PUBLIC_VALIDATION)
    elif settings.data.public_source is not None:
        write_public(PUBLIC_VALIDATION, settings.data.public_source)
    else:
        own, data = settings.pretrain, settings.data
        seed = own.data_seed + 1
        write_public_narratives(PUBLIC_VALIDATION, own.validation_encounters, seed, data.template, data.label)


def write_public_narratives(
    out: Path, encounters: int, seed: int, template: str = PLAIN, label: str | None = None
) -> None:
    """Write narratives of a generated public cohort, which depends on nobody; equal for equal arguments."""
    with TemporaryDirectory(prefix="dptune-") as work:
        acquired = acquire_synthetic(Path(work), encounters, seed, kind="public")
        write_narratives(acquired.table, acquired.ids_mapping, acquired.manifest, out, template, label)


if __name__ == "__main__":
    run_stage(write_validation)
