"""DVC stage: the public base model, from public synthetic narratives only."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory

from dptune.corpus.codes import with_codes
from dptune.corpus.narratives import write_narratives
from dptune.corpus.records import read_records
from dptune.corpus.sources import acquire_synthetic
from dptune.files import write_json
from tasks.paths import PUBLIC_MODEL, PUBLIC_VALIDATION
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def pretrain_public_model() -> None:
    """Generate public narratives (independent marginals, their own seeds), train on them, keep a validation set."""
    from dptune.training.pretrain import Pretraining, pretrain

    settings = load_settings().pretrain
    PUBLIC_MODEL.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=PUBLIC_MODEL.parent, prefix=".pretrain-") as scratch:
        work = Path(scratch)
        texts = _public_narratives(work / "train", settings.encounters, settings.data_seed)
        validation = _public_narratives(work / "validation", settings.validation_encounters, settings.data_seed + 1)
        shape = {field.name: getattr(settings, field.name) for field in fields(Pretraining)}
        told = with_codes(_texts(texts), settings.codes, settings.data_seed)
        figures = pretrain(told, _texts(validation), Pretraining(**shape), work / "model")
        write_json(work / "model" / "pretraining.json", {"data": "SYNTHETIC public narratives", **figures})
        shutil.copy(validation, work / "public_validation.parquet")
        shutil.rmtree(PUBLIC_MODEL, ignore_errors=True)
        (work / "model").rename(PUBLIC_MODEL)
        (work / "public_validation.parquet").rename(PUBLIC_VALIDATION)


def _public_narratives(directory: Path, encounters: int, seed: int) -> Path:
    directory.mkdir()
    acquired = acquire_synthetic(directory, encounters, seed, kind="public")
    out = directory / "narratives.parquet"
    write_narratives(acquired.table, acquired.ids_mapping, acquired.manifest, out)
    return out


def _texts(path: Path) -> list[str]:
    return list(read_records(path).text.to_pylist())


if __name__ == "__main__":
    run_stage(pretrain_public_model)
