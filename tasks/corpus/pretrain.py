"""DVC stage: the public base model, from public synthetic narratives only; skipped where no model of params.yaml is it.

python -m tasks.corpus.pretrain [--always]
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from dptune.corpus.codes import with_codes
from dptune.corpus.records import read_records
from dptune.files import private_directory, write_json
from tasks.corpus.validation import write_public_narratives
from tasks.paths import NEEDED, PUBLIC_MODEL, PUBLIC_NARRATIVES, SKIPPED
from tasks.settings.params import load_settings
from tasks.stage import run_command

_REASON = f"no model of experiment.models has {PUBLIC_MODEL} as its source, so it is not trained"


def pretrain_public_model() -> None:
    """Generate public narratives (independent marginals, their own seeds), train on them, keep a validation set."""
    from dptune.training.pretrain import pretrain

    settings = load_settings().pretrain
    private_directory(PUBLIC_MODEL.parent)
    with TemporaryDirectory(dir=PUBLIC_MODEL.parent, prefix=".pretrain-") as scratch:
        work = Path(scratch)
        texts, validation = work / "texts.parquet", work / "validation.parquet"
        write_public_narratives(texts, settings.encounters, settings.data_seed)
        write_public_narratives(validation, settings.validation_encounters, settings.data_seed + 1)
        told = with_codes(_texts(texts), settings.codes, settings.data_seed)
        figures = pretrain(told, _texts(validation), settings, work / "model")
        write_json(work / "model" / "pretraining.json", {"data": "SYNTHETIC public narratives", **figures})
        shutil.rmtree(PUBLIC_MODEL, ignore_errors=True)
        (work / "model").rename(PUBLIC_MODEL)
        validation.rename(PUBLIC_NARRATIVES)
    SKIPPED.unlink(missing_ok=True)


def _texts(path: Path) -> list[str]:
    return list(read_records(path).text.to_pylist())


def skip() -> None:
    """Leave a note in place of the model; a model that was trained before is removed, as DVC does with outputs."""
    private_directory(PUBLIC_MODEL.parent)
    shutil.rmtree(PUBLIC_MODEL, ignore_errors=True)
    PUBLIC_NARRATIVES.unlink(missing_ok=True)
    write_json(SKIPPED, {str(PUBLIC_MODEL): _REASON})
    logging.getLogger(__name__).info("%s", _REASON)


def main(
    always: Annotated[bool, typer.Option("--always", help="Train it though no model of the experiment is it.")] = False,
) -> None:
    """Train the public base model, unless no model of the experiment is it."""
    needed = always or bool(json.loads(NEEDED.read_text(encoding="utf-8"))[str(PUBLIC_MODEL)])
    if needed:
        pretrain_public_model()
    else:
        skip()


if __name__ == "__main__":
    run_command(main)
