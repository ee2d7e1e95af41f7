"""The folder that is handed on: adapter, tokenizer, ledger and a card that says what the ledger says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from dptune.errors import DptuneError
from dptune.files import naming, sha256, write_text
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.training.model import save_adapter
from dptune.tuning.card import END, START, card_text, privacy_section

WEIGHTS, CARD, CONFIG = "adapter_model.safetensors", "README.md", "adapter_config.json"


class CardError(DptuneError):
    """A card that does not say what the ledger beside it says."""


def partial_of(folder: RunFolder) -> Path:
    """Where the adapter lies until the ledger has its last line."""
    return folder.adapter.with_name(".adapter.partial")


def write_weights(model: Any, tokenizer: Any, folder: RunFolder, base: str, revision: str | None) -> None:
    """Write adapter and tokenizer, to be delivered once the ledger is finished. No path of this machine is in them."""
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_adapter(model, partial)
        with naming(partial):
            tokenizer.save_pretrained(str(partial))
        _change(partial / CONFIG, base_model_name_or_path=base, revision=revision)
        if (named := partial / "tokenizer_config.json").exists() and "name_or_path" in named.read_text("utf-8"):
            _change(named, name_or_path=base)
        _write_card(partial, base, "")
    except BaseException:  # a full disk, say: the next try would find it fuller
        shutil.rmtree(partial, ignore_errors=True)
        raise


def deliver(folder: RunFolder, result: Mapping[str, Any]) -> None:
    """Put ledger and card beside the weights, and all under its name. The ledger must be finished."""
    partial = partial_of(folder)
    shutil.copyfile(folder.ledger, partial / folder.ledger.name)
    section = _section(partial)
    _write_card(partial, str(result["base"]), card_text(section, result))
    shutil.rmtree(folder.adapter, ignore_errors=True)
    partial.rename(folder.adapter)


def is_deliverable(path: Path) -> bool:
    """Whether a folder holds an adapter with its ledger."""
    return (path / CONFIG).is_file() and RunFolder(path).ledger.is_file()


def check_deliverable(path: Path) -> LedgerContents:
    """What the ledger of a deliverable says, once its card was found to say the same of these very weights.

    Raises: LedgerError for a ledger that is torn or edited; CardError for a card that says something else, and for
        weights that it is not about; DptuneError for a folder without one of them.
    """
    ledger, card = RunFolder(path).ledger, path / CARD
    contents = read_ledger(ledger)
    for needed in (card, path / WEIGHTS):
        if not needed.is_file():
            raise DptuneError(f"{needed}: is missing. Fix: take the whole folder that the run delivered.")
    text, expected = card.read_text(encoding="utf-8", errors="replace"), _section(path)
    found, after = text.partition(START), text.partition(END)[2]
    if not found[1] or START in found[2] or END in after or not after:
        raise CardError(f"{card}: has no single section that dptune wrote. Fix: take the card that the run delivered.")
    section = START + found[2].partition(END)[0] + END
    for said, right in zip(section.splitlines(), expected.splitlines(), strict=False):
        if said != right:
            problem = f"says {said.strip()!r} where ledger and weights say {right.strip()!r}"
            raise CardError(f"{card}: {problem}. Fix: do not trust it; take the card that the run delivered.")
    if section != expected:
        raise CardError(f"{card}: lacks lines of its guarantee. Fix: take the card that the run delivered.")
    return contents


def _section(path: Path) -> str:
    ledger = RunFolder(path).ledger
    return privacy_section(read_ledger(ledger), sha256(ledger), sha256(path / WEIGHTS))


def _write_card(path: Path, base: str, text: str) -> None:
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
