"""An ensemble that answers: its base, protocol and one ledger, opened together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dptune.errors import ConfigError
from dptune.files import write_json
from dptune.prediction.ensemble import Manifest, load_adapters, read_manifest
from dptune.prediction.predictor import Answer, PrivatePredictor
from dptune.prediction.protocols import PUBLISHED_ACCOUNTANT, FixedMixture, planned_answers, protocol_of
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger import Ledger, LedgerContents, LedgerError, RunHeader, chain_after, read_ledger
from dptune.privacy.release import Composition
from dptune.privacy.set_aside import fresh_start
from dptune.training.model import BaseModel, load_base, load_tokenizer

LEDGER, _SERVED = "ledger.jsonl", "served.json"


@dataclass(frozen=True)
class Deployment:
    """What answers prompts.

    Attributes:
        predictor: the protocol with its budget.
        tokenizer: of the base.
        manifest: of the ensemble.
    """

    predictor: PrivatePredictor
    tokenizer: Any
    manifest: Manifest

    def generate(self, prompt: str, most: int) -> Iterator[Answer]:
        """Up to ``most`` tokens that follow the prompt; an empty prompt begins a new text."""
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"] or [end]
        return self.predictor.generate(ids, most, end)

    def text(self, answers: list[Answer]) -> str:
        """The text of some answers."""
        return str(self.tokenizer.decode([answer.token for answer in answers], skip_special_tokens=True))

    @property
    def budget(self) -> dict[str, Any]:
        """What is spent and what is left, by name. Public."""
        protocol, spent = self.predictor.protocol, self.predictor.spent
        return {
            "tokens": protocol.tokens,
            "tokens_left": protocol.tokens - spent,
            "epsilon": protocol.epsilon,
            "epsilon_spent": self.predictor.epsilon_spent,
            "delta": protocol.delta,
            "unit": protocol.unit,
            "models": protocol.models,
            "data": self.manifest.data,
        }


def deploy(ensemble: Path, device: torch.device, entropy: Entropy | None = None) -> Deployment:
    """Open an ensemble for answers; close its predictor afterwards.

    Raises: ConfigError for an ensemble that is not whole or not of its base; LedgerError as ``open_ledger``.
    """
    manifest, entropy = read_manifest(ensemble), entropy or OsEntropy()
    protocol = protocol_of("pmixed", manifest.protocol)
    assert isinstance(protocol, FixedMixture)
    base = BaseModel(manifest.source, manifest.revision, manifest.dtype)
    model = load_base(base, device)
    adapters = load_adapters(ensemble, manifest, model, device)
    tokenizer = load_tokenizer(base)
    ledger = open_ledger(ensemble, manifest, protocol, entropy)

    def remember(charged: Ledger) -> None:
        _note(ensemble / _SERVED, charged, charged.chain)

    return Deployment(PrivatePredictor(model, adapters, protocol, ledger, entropy, remember), tokenizer, manifest)


def answered(ensemble: Path) -> bool:
    """Whether the ensemble was ever opened for answers, so that its protocol is fixed for good."""
    return (ensemble / _SERVED).exists() or (ensemble / LEDGER).exists()


def open_ledger(ensemble: Path, manifest: Manifest, protocol: FixedMixture, entropy: Entropy) -> Ledger | None:
    """The ensemble's one ledger, started or continued; None when all its tokens are spent.

    An ensemble that has answered keeps a note beside its ledger: the run's number, how many tokens were charged and
    the chain up to them. A ledger that was lost, cut or put back to an older copy is found out by it. Whoever puts
    both back, or copies the whole folder, is not.

    Raises: ConfigError for a unit that the partition does not protect; LedgerError if another process answers, the
        ledger was lost or damaged, or was started with other settings.
    """
    if protocol.unit == "patient" and manifest.key != "patient":
        problem = "patient is no unit of an ensemble whose shards go by record: a patient is in many of them"
        raise ConfigError("prediction.unit", problem, fix="partition by patient, or use unit record or shard")
    path, note = ensemble / LEDGER, ensemble / _SERVED
    header = RunHeader(
        mechanism=protocol.name,
        published_accountant=PUBLISHED_ACCOUNTANT,
        accounting="certified",
        epsilon=protocol.epsilon,
        delta=protocol.delta,
        unit=protocol.unit,
        units=protocol.models,
        data=manifest.data,
        telemetry="private",
        leaks=entropy.leaks,
    )
    planned = planned_answers(protocol)
    if path.exists() and not note.exists():
        Ledger.discard_unborn(path)
    if not path.exists() and note.exists():
        gone = f"{path}: is gone, but this ensemble has answered"
        raise LedgerError(f"{gone}. Fix: restore it; or {fresh_start(ensemble)}.")
    ledger = _resumed(path, planned) if path.exists() else Ledger.create(path, header, planned)
    try:
        _check_same(path, ledger, protocol, header, note)
    except BaseException:
        if ledger:
            ledger.close()
        raise
    if ledger and ledger.releases >= protocol.tokens:
        ledger.finish()  # the process died between its last charge and this line
        return None
    return ledger


def _resumed(path: Path, planned: Composition) -> Ledger | None:
    try:
        return Ledger.resume(path, planned)
    except LedgerError:
        if read_ledger(path).complete:
            return None
        raise


def _check_same(path: Path, ledger: Ledger | None, protocol: FixedMixture, wanted: RunHeader, note: Path) -> None:
    """The ledger is this ensemble's own, of this protocol; if it is new, say so beside it."""
    contents = read_ledger(path) if ledger is None else ledger
    ours, theirs = ({**header.to_dict(), "run_id": ""} for header in (wanted, contents.header))
    changed = [key for key in ours if ours[key] != theirs[key]]
    if set(contents.composition) - {protocol.release}:
        changed.append("protocol")
    if changed:
        problem = f"was started with other settings ({', '.join(changed)})"
        raise LedgerError(f"{path}: {problem}. Fix: give the settings it was started with.")
    if note.exists():
        _check_note(path, note, contents)
    _note(note, contents, chain_after(path, contents.releases))


def _check_note(path: Path, note: Path, contents: Ledger | LedgerContents) -> None:
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        run_id, releases, chain = known["run_id"], int(known["releases"]), known["chain"]
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(f"{note}: is damaged. Fix: restore it; the ledger alone cannot be trusted.") from None
    if run_id != contents.header.run_id:
        raise LedgerError(f"{path}: is not the ledger that this ensemble answered from. Fix: restore that one.")
    if contents.releases < releases or chain_after(path, releases) != chain:
        problem = f"is an older or another copy: it holds {contents.releases} tokens, and {releases} were answered"
        raise LedgerError(f"{path}: {problem}. Fix: restore the newest.")


def _note(note: Path, contents: Ledger | LedgerContents, chain: str | None) -> None:
    write_json(note, {"run_id": contents.header.run_id, "releases": contents.releases, "chain": chain})
