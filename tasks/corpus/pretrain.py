"""DVC stage: the public base model, from public texts only; skipped where no model of params.yaml is it.

python -m tasks.corpus.pretrain [--always]

A rerun keeps a model that was made of the same settings and texts: weights that were trained again may differ in their
last bits, on another processor for example, and would rename every finished cell.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from dptune.core.declarations import plain
from dptune.core.files import private_directory, put_folder, read_json, sha256, write_json
from dptune.records.canaries import POOL, with_codes
from dptune.records.parquet_file import Records, read_about, read_records, write_records
from dptune.records.wikitext import cleaned_articles
from tasks.corpus.validation import write_public_narratives
from tasks.paths import NEEDED, PUBLIC_MADE_OF, PUBLIC_MODEL, PUBLIC_NARRATIVES, PUBLIC_SAMPLES, SKIPPED
from tasks.settings.experiment import Pretrain
from tasks.settings.params import load_settings
from tasks.stage import run_command

_REASON = f"no model of experiment.models has {PUBLIC_MODEL} as its source, so it is not trained"


def pretrain_public_model() -> None:
    """Train on public texts, narratives or articles of WikiText-2, and keep others for validation."""
    import torch  # takes seconds, and is not needed where the stage is skipped

    from dptune.training.models.pretrain import VERSION, pretrain

    told = load_settings()
    settings, template = told.pretrain, told.data.template
    private_directory(PUBLIC_MODEL.parent)
    with TemporaryDirectory(dir=PUBLIC_MODEL.parent, prefix=".pretrain-") as scratch:
        work = Path(scratch)
        texts, validation = _TEXTS[settings.source](settings, work, template)
        label, held_out = str(read_about(validation)["label"]), list(read_records(validation).text.to_pylist())
        digest = hashlib.sha256(json.dumps([label, texts, held_out]).encode()).hexdigest()
        made_of = {"settings": plain(settings), "texts": digest, "version": VERSION}
        if PUBLIC_MADE_OF.exists() and read_json(PUBLIC_MADE_OF) == {"made_of": made_of, "files": _files()}:
            logging.getLogger(__name__).info("%s was made of the same settings and texts, and stays", PUBLIC_MODEL)
            return
        PUBLIC_MADE_OF.unlink(missing_ok=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        figures = pretrain(texts, held_out, settings, work / "model", device)
        write_json(work / "model" / "pretraining.json", {"data": label, **figures})
        put_folder(work / "model", PUBLIC_MODEL)
        validation.rename(PUBLIC_NARRATIVES)
    write_json(PUBLIC_SAMPLES, {"texts": _samples(settings, device)})
    SKIPPED.unlink(missing_ok=True)
    write_json(PUBLIC_MADE_OF, {"made_of": made_of, "files": _files()})


def _files() -> dict[str, str]:
    """The digest of each file that ``pretrain_public_model`` leaves, by its path."""
    files = [*PUBLIC_MODEL.glob("*"), PUBLIC_NARRATIVES, PUBLIC_SAMPLES]
    return {path.as_posix(): sha256(path) for path in files if path.is_file()}


def _narratives(settings: Pretrain, work: Path, template: str) -> tuple[list[str], Path]:
    """Generated narratives (independent marginals, their own seeds), and a file of others."""
    texts, validation = work / "texts.parquet", work / "validation.parquet"
    write_public_narratives(texts, settings.encounters, settings.data_seed, template)
    write_public_narratives(validation, settings.validation_encounters, settings.data_seed + 1, template)
    return with_codes(list(read_records(texts).text.to_pylist()), settings.codes, settings.data_seed), validation


def _articles(settings: Pretrain, work: Path, _template: str) -> tuple[list[str], Path]:
    """The articles of WikiText-2's train part, and a file of those of its dev part."""
    validation = work / "validation.parquet"
    held_out = cleaned_articles(str(settings.path), "dev")
    about = {"source": "wikitext", "synthetic": False, "label": "public articles of WikiText-2"}
    places = np.arange(len(held_out), dtype=np.int64)
    write_records(validation, Records(places, places, pa.array(held_out, pa.string()), about))
    return cleaned_articles(str(settings.path), half=settings.half), validation


def _both(settings: Pretrain, work: Path, template: str) -> tuple[list[str], Path]:
    """Articles and narratives, and a file of other narratives."""
    texts, validation = _narratives(settings, work, template)
    return cleaned_articles(str(settings.path), half=settings.half) + texts, validation


def _samples(settings: Pretrain, device: Any) -> list[str]:
    """Texts that the model writes, which audit canaries may say; none of an encoder, which writes nothing."""
    from dptune.audit.text.likelihood import sampled_texts
    from dptune.training.models.model import ModelSource, load_base, load_tokenizer

    if settings.shape != "gpt2":
        return []
    source = ModelSource(str(PUBLIC_MODEL), None, settings.dtype)
    return sampled_texts(load_base(source, device), load_tokenizer(source), POOL, seed=settings.data_seed)


_TEXTS = {"narratives": _narratives, "wikitext": _articles, "both": _both}


def skip() -> None:
    """Leave a note in place of the model; a model that was trained before is removed, as DVC does with outputs."""
    private_directory(PUBLIC_MODEL.parent)
    shutil.rmtree(PUBLIC_MODEL, ignore_errors=True)
    for file in (PUBLIC_NARRATIVES, PUBLIC_MADE_OF):
        file.unlink(missing_ok=True)
    write_json(PUBLIC_SAMPLES, {"texts": []})  # the stage canaries depends on the file
    write_json(SKIPPED, {str(PUBLIC_MODEL): _REASON})
    logging.getLogger(__name__).info("%s", _REASON)


def main(
    always: Annotated[
        bool, typer.Option("--always", help="Train the public model even if the experiment does not use it.")
    ] = False,
) -> None:
    """Train the public base model, unless no model of the experiment is it."""
    needed = always or bool(read_json(NEEDED)[str(PUBLIC_MODEL)])
    if needed:
        pretrain_public_model()
    else:
        skip()


if __name__ == "__main__":
    run_command(main)
