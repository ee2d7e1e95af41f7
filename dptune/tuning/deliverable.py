"""The folder that is handed on: adapter, tokenizer, ledger and a card that says what the ledger says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from dptune.files import PRIVATE_DIRECTORY, PRIVATE_FILE, naming, write_json, write_text
from dptune.privacy.run_folder import RunFolder
from dptune.training.model import save_adapter
from dptune.tuning.card import card_text
from dptune.tuning.verifying import CARD, CONFIG, section_of
from dptune.tuning.weights import partial_of


def write_weights(
    model: Any,
    tokenizer: Any,
    folder: RunFolder,
    base: str,
    revision: str | None,
    kept: Mapping[str, Any],
) -> None:
    """Write adapter and tokenizer, to be delivered once the ledger is finished. No path of this machine is in them.

    Args:
        kept: what else is needed to use them, by name of file, as JSON; see ``PreparedRun.kept``. Public.
    """
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_adapter(model, partial)
        with naming(partial):
            tokenizer.save_pretrained(str(partial))
        for name, content in kept.items():
            write_json(partial / name, content)
        _change(partial / CONFIG, base_model_name_or_path=base, revision=revision)
        if (named := partial / "tokenizer_config.json").exists() and "name_or_path" in named.read_text("utf-8"):
            _change(named, name_or_path=base)
        write_card(partial, base, "")
    except BaseException:  # on a full disk, what stays would make the next try fail too
        shutil.rmtree(partial, ignore_errors=True)
        raise


def deliver(folder: RunFolder, result: Mapping[str, Any]) -> None:
    """Put ledger and card beside the weights, and all under its name. The ledger must be finished."""
    partial = partial_of(folder)
    shutil.copyfile(folder.ledger, partial / folder.ledger.name)
    write_card(partial, str(result["base"]), card_text(section_of(partial), result))
    for path in partial.rglob("*"):  # some libraries write files that every user may read
        path.chmod(PRIVATE_DIRECTORY if path.is_dir() else PRIVATE_FILE)
    partial.chmod(PRIVATE_DIRECTORY)
    shutil.rmtree(folder.adapter, ignore_errors=True)
    partial.rename(folder.adapter)


def write_card(path: Path, base: str, text: str) -> None:
    """PEFT's card with its metadata, and ``text`` in place of its blanks to be filled in."""
    card = ModelCard.load(path / CARD)
    card.data["base_model"] = base
    tags = card.data.get("tags") or []
    card.data["tags"] = sorted({tag for tag in tags if not tag.startswith("base_model:")} | {"differential-privacy"})
    card.text = text
    write_text(path / CARD, str(card))


def _change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    write_text(path, json.dumps(content | values, indent=2, sort_keys=True) + "\n")
