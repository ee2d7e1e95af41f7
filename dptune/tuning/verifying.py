"""Checks that a deliverable's card says what its ledger says, about the weights beside it. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from dptune.errors import DptuneError
from dptune.files import sha256
from dptune.privacy.ledger_file import LedgerContents, read_ledger
from dptune.privacy.run_folder import RunFolder
from dptune.tuning.card import END, START, privacy_section

WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"
#: Names of a classifier's labels, in the order of its outputs; only a classifier's folder has it.
LABELS = "labels.json"
#: Files of a tokenizer, as transformers names them.
_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


class CardError(DptuneError):
    """A card that contradicts the ledger or the files beside it."""


def check_deliverable(path: Path) -> LedgerContents:
    """Check a deliverable's card against its ledger and files, and return the ledger's content.

    Raises: LedgerError for a ledger that is torn or edited; CardError for a card that contradicts the ledger, or whose
        adapter or tokenizer was replaced; DptuneError for a folder that lacks one of them.
    """
    card = path / CARD
    contents = read_ledger(RunFolder(path).ledger)
    for needed in (card, path / WEIGHTS, path / CONFIG):
        if not needed.is_file():
            raise DptuneError(f"{needed}: is missing. Fix: take the whole folder that the run delivered.")
    said, right = _written_section(card), section_of(path)
    for line, expected in zip(said.splitlines(), right.splitlines(), strict=False):
        if line != expected:
            problem = f"says {line.strip()!r} where ledger and files say {expected.strip()!r}"
            raise CardError(f"{card}: {problem}. Fix: do not trust it; take the card that the run delivered.")
    if said != right:
        raise CardError(f"{card}: lacks lines of its guarantee. Fix: take the card that the run delivered.")
    return contents


def section_of(path: Path) -> str:
    """The section "Privacy" that the card should have, made from ledger, adapter and tokenizer."""
    ledger = RunFolder(path).ledger
    files = (ledger, path / WEIGHTS, path / CONFIG, path / LABELS, *(path / name for name in _TOKENIZER))
    digests = {file.name: sha256(file) for file in files if file.is_file()}
    return privacy_section(read_ledger(ledger), digests, classifies=LABELS in digests)


def _written_section(card: Path) -> str:
    """The section "Privacy" that the card does have. Raises: CardError unless there is exactly one."""
    text = card.read_text(encoding="utf-8", errors="replace")
    if text.count(START) != 1 or text.count(END) != 1 or text.index(END) < text.index(START):
        raise CardError(f"{card}: has no single section that dptune wrote. Fix: take the card that the run delivered.")
    return text[text.index(START) : text.index(END) + len(END)]
