"""The folder that is handed on: adapter, tokenizer, ledger and a card that says what the ledger says.

It holds no statistic of private records that the certified epsilon does not cover, and its files bear no time. It is
there whole or not at all: it is made beside its place under a hidden name, all of it durable, then renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from dptune.core.files import (
    PRIVATE_DIRECTORY,
    PRIVATE_FILE,
    discard_partial,
    forget_times,
    naming,
    put_folder,
    read_json,
    write_json,
    write_text,
)
from dptune.job.delivery.card import TAG, card_text, has_guarantee
from dptune.job.delivery.named_base import BASE, NamedBase
from dptune.job.delivery.verification import CARD, CONFIG, section_of
from dptune.job.delivery.weights import LORA, form_of, partial_of, weights_file, written_adapter
from dptune.job.result import RunResult
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.run_folder import RunFolder


def write_weights(
    model: Any,
    tokenizer: Any,
    folder: RunFolder,
    base: NamedBase,
    kept: Mapping[str, Any],
) -> None:
    """Write trained weights and tokenizer, to be delivered once the ledger is finished, without a path of this machine.

    Args:
        kept: what else is needed to use them, by name of file, as JSON; see ``PreparedRun.kept``. Public.
    """
    with written_adapter(model, folder) as partial:
        with naming(partial):
            tokenizer.save_pretrained(str(partial))
        for name, content in {**kept, BASE: base.to_dict()}.items():
            write_json(partial / name, content)
        if weights_file(partial).name == LORA.weights:
            _change(partial / CONFIG, base_model_name_or_path=base.name, revision=base.revision)
        if (named := partial / "tokenizer_config.json").exists() and "name_or_path" in named.read_text("utf-8"):
            _change(named, name_or_path=base.name)


def deliver(folder: RunFolder, result: RunResult) -> None:
    """Put ledger and card beside the weights, and all under its name. The ledger must be finished."""
    discard_partial(partial := partial_of(folder))
    shutil.copyfile(folder.ledger, partial / folder.ledger.name)
    write_card(partial, result)
    for path in partial.rglob("*"):  # some libraries write files that every user may read
        path.chmod(PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE)
    partial.chmod(PRIVATE_DIRECTORY)
    forget_times(partial)
    put_folder(partial, folder.adapter)


def write_card(path: Path, result: RunResult) -> str:
    """Write the card of a folder that holds all else already: metadata for the hub, and the text, which is returned.

    No line of it, the checked section apart, follows from anything but settings and public records.
    """
    section, epsilon = section_of(path)
    train = read_ledger(RunFolder(path).ledger).header.train
    text, is_lora = card_text(section, result, epsilon, train), form_of(train) is LORA
    about = ModelCardData(
        base_model=result.base,
        library_name="peft" if is_lora else "transformers",
        pipeline_tag="text-classification" if result.task == "classify" else "text-generation",
        tags=[*([TAG] if has_guarantee(epsilon) else []), *(["lora", "transformers"] if is_lora else [])],
    )
    write_text(path / CARD, f"---\n{about}\n---\n{text}")
    return text


def _change(path: Path, **values: Any) -> None:
    content = read_json(path)
    write_text(path, json.dumps(content | values, indent=2, sort_keys=True) + "\n")
