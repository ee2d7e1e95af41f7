"""The deployment of an ensemble: its base, protocol and one ledger, opened together to answer prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dptune.core.errors import ConfigError, first_line
from dptune.core.files import jsonable, locked, read_json, write_json
from dptune.core.settings import RECORD
from dptune.prediction.booking import book
from dptune.prediction.ensemble import Manifest, load_adapters, read_manifest
from dptune.prediction.predictor import Answer, PrivatePredictor, next_log_probabilities
from dptune.prediction.protocols import PUBLISHED_ACCOUNTANT, FixedMixture, planned_answers, protocol_of
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger import Ledger, check_same_run
from dptune.privacy.ledger_file import (
    LedgerContents,
    LedgerError,
    chain_after,
    discard_unborn,
    is_complete,
    read_ledger,
)
from dptune.privacy.run_folder import RunFolder, Spending, earlier_runs, fresh_start, spending_of
from dptune.privacy.run_header import RunHeader
from dptune.training.data import open_ids
from dptune.training.gradients.stacked_adapters import PUBLIC, StackedAdapters
from dptune.training.models.causal import plain_tokens
from dptune.training.models.model import ModelSource, load_base, load_tokenizer
from dptune.training.tokens.chat_template import render_chat

_LOCK = "opening.lock"
#: Largest number of characters of a prompt: many times what a model sees, and tokenised in milliseconds.
MOST_CHARACTERS = 16_384
#: Options that a manifest must state to be served: no default may replace what the owner of the data consented to.
SERVED_OPTIONS = ("epsilon", "delta", "alpha", "tokens", "models", "public_weight", "unit")


@dataclass(frozen=True)
class Deployment:
    """An open ensemble that answers prompts.

    Attributes:
        predictor: predictor that answers within the budget.
        tokenizer: the base model's tokenizer.
        manifest: the ensemble's manifest.
        earlier: what earlier runs on the same records spent, which were set aside.
        notes: what the owner of the records should know of their register, in sentences.
    """

    predictor: PrivatePredictor
    tokenizer: Any
    manifest: Manifest
    earlier: tuple[Spending, ...] = ()
    notes: tuple[str, ...] = ()

    def generate(self, prompt: str, most: int) -> Iterator[Answer]:
        """Answer up to ``most`` tokens that follow the prompt; an empty prompt begins a new text.

        A prompt that is longer than the model's context is cut at its start. An ensemble of chats takes the prompt as
        what a user says, and answers as its assistant.

        Raises: ConfigError as ``check_prompt``, before anything is charged.
        """
        check_prompt(prompt)
        end = self.tokenizer.eos_token_id
        return self.predictor.generate(self._ids(prompt) or [end], most, end)

    def _ids(self, prompt: str) -> list[int]:
        if self.manifest.form == "messages" and prompt:
            said = [{"role": "user", "content": prompt}]
            text = render_chat(said, self.tokenizer, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return open_ids([prompt], self.tokenizer)[0]

    def text(self, answers: list[Answer]) -> str:
        """Decode the tokens of some answers to text."""
        return str(self.tokenizer.decode([answer.token for answer in answers], skip_special_tokens=True))

    @property
    def budget(self) -> dict[str, Any]:
        """The budget that is spent and left, by name. Public.

        ``earlier_epsilon`` was spent on the same records by runs that were set aside, and adds to the rest.
        """
        protocol, spent = self.predictor.protocol, self.predictor.tokens_spent
        return {
            "tokens": protocol.tokens,
            "tokens_left": protocol.tokens - spent,
            "epsilon": protocol.epsilon,
            "epsilon_spent": self.predictor.epsilon_spent,
            "delta": protocol.delta,
            "unit": protocol.unit,
            "models": protocol.models,
            "data": self.manifest.data,
            "earlier": len(self.earlier),
            **jsonable({"earlier_epsilon": math.fsum(one.epsilon for one in self.earlier)}),
        }


def check_prompt(prompt: str) -> None:
    """Refuse a prompt that is too long, or is not valid text.

    Raises: ConfigError, which does not repeat the prompt.
    """
    if len(prompt) > MOST_CHARACTERS:
        problem = f"has {len(prompt):,} characters, and at most {MOST_CHARACTERS:,} are taken"
        raise ConfigError("prompt", problem, fix="send only the end of the prompt: the model sees no more than that")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        problem = "is not a text: it holds bytes that are not UTF-8, or half of a surrogate pair"
        raise ConfigError("prompt", problem, fix="send valid UTF-8") from None


def deploy(
    ensemble: Path, device: torch.device, entropy: Entropy | None = None, register: Path | None = None
) -> Deployment:
    """Open an ensemble for answers; close its predictor afterwards.

    Args:
        register: file of the register in which its budget counts; None takes the one of its ``booking``.

    Raises: ConfigError for an ensemble that is incomplete, was tuned on another base, or has no budget for answers,
        and as ``book``; LedgerError as ``open_ledger``, and for a register that is damaged or cannot be written.
    """
    manifest, entropy = read_manifest(ensemble), entropy or OsEntropy()
    protocol = _served_protocol(ensemble, manifest)
    base = ModelSource(manifest.source, manifest.revision, manifest.dtype, manifest.load_in_4bit)
    model = load_base(base, device)
    adapters = load_adapters(ensemble, manifest, model, device)
    tokenizer = load_tokenizer(base)
    _rehearse(model, adapters)
    notes: list[str] = []

    def count(header: RunHeader, answered: bool) -> None:
        notes.extend(book(ensemble, header, planned_answers(protocol), register, answered=answered))

    ledger = open_ledger(ensemble, manifest, protocol, entropy, count)
    note = RunFolder(ensemble).served

    def remember(charged: Ledger) -> None:
        try:
            _note(note, charged, charged.chain)
        except OSError as error:
            problem = f"cannot be written ({error.strerror}); the token is charged but was not returned"
            raise LedgerError(f"{note}: {problem}. Fix: free space, or make its folder writable.") from error

    earlier = tuple(spent for folder in earlier_runs(ensemble) if (spent := spending_of(folder)))
    predictor = PrivatePredictor(model, adapters, protocol, ledger, entropy, remember)
    return Deployment(predictor, tokenizer, manifest, earlier, tuple(notes))


def _rehearse(model: Any, adapters: StackedAdapters) -> None:
    """Compute the public model's and one slot's law of a made-up token: an answer that fails is charged all the same.

    Raises: ConfigError for a model that cannot, or whose public law is not finite.
    """
    try:
        logs = next_log_probabilities(model, adapters, plain_tokens(model)[:1].tolist(), [PUBLIC, 0])
    except Exception as error:  # each model has its own way to fail
        problem = f"no law of a next token can be computed ({type(error).__name__}: {first_line(error)})"
        raise ConfigError("model", problem, fix="give the checkpoint that the ensemble was tuned on") from error
    if bool(logs[0].isnan().any()):  # of the private row nothing is looked at
        problem = "computes a law of a next token that is not finite"
        raise ConfigError("model", problem, fix="check the base model's files")


def _served_protocol(ensemble: Path, manifest: Manifest) -> FixedMixture:
    """Read the protocol from the manifest, and check it before the ledger is opened.

    Raises: ConfigError if the manifest lacks an option of it, or it is for another number of slots.
    """
    missing = [name for name in SERVED_OPTIONS if name not in manifest.protocol]
    if missing:
        problem = f"{ensemble} cannot answer: no budget was set for its answers (no {', '.join(missing)})"
        fix = f"set prediction.serve, its models to {manifest.models}, and run `python -m flows.prediction`"
        raise ConfigError("prediction.serve", problem, fix=fix)
    protocol = protocol_of("pmixed", manifest.protocol)
    assert isinstance(protocol, FixedMixture)
    if protocol.models != manifest.models:
        problem = f"{ensemble} has {manifest.models} slots, and its protocol {protocol.models}"
        raise ConfigError("prediction.serve.models", problem, fix=f"set it to {manifest.models}")
    return protocol


def has_answered(ensemble: Path) -> bool:
    """Whether the ensemble was ever opened for answers; from then on its protocol must not change."""
    folder = RunFolder(ensemble)
    return folder.served.exists() or folder.ledger.exists()


def open_ledger(
    ensemble: Path,
    manifest: Manifest,
    protocol: FixedMixture,
    entropy: Entropy,
    count: Callable[[RunHeader, bool], object] = lambda header, answered: None,
) -> Ledger | None:
    """Start or resume the ensemble's only ledger; None if all its tokens are spent.

    A note beside the ledger holds the run's number, how many tokens were charged and the chain up to them. It is
    written before the ledger is made and after every charge, before the token is drawn. So there is never a ledger
    without a note, nor one with fewer tokens than its note states. This detects a ledger that was lost, cut or replaced
    by an older copy, and a note that was removed. It does not detect that both were replaced or removed, or that the
    whole folder was copied.

    Args:
        count: counts the ensemble in its register, given the header and whether it has answered. Called before a new
            ledger gets its first line, when nothing can refuse it any more, and for one that is resumed or ended.

    Raises: ConfigError for a unit that the partition does not protect; LedgerError if another process answers, the
        ledger or its note was lost or damaged, or was started with other settings.
    """
    if protocol.unit not in ("shard", RECORD, manifest.key):
        problem = f"a {protocol.unit} is in many shards of an ensemble whose shards go by {manifest.key}"
        fix = f"partition by {protocol.unit}, or use unit record or shard"
        raise ConfigError("prediction.unit", problem, fix=fix)
    header = RunHeader(
        mechanism=protocol.name,
        published_accountant=PUBLISHED_ACCOUNTANT,
        accounting="certified",
        epsilon=protocol.epsilon,
        delta=protocol.delta,
        unit=protocol.unit,
        units=protocol.models,
        data=manifest.data,
        telemetry=manifest.telemetry,
        leaks=entropy.leaks,
    )
    try:
        # Two processes that start at once would each write a note, and one of them its ledger.
        with locked(ensemble / _LOCK, wait=True):
            ledger = _started_or_resumed(ensemble, header, protocol, count)
    except OSError as error:
        problem = f"cannot be opened for answers ({error.strerror}): {error.filename}"
        raise LedgerError(f"{ensemble}: {problem}. Fix: make the folder writable, or free space.") from error
    if ledger and ledger.releases >= protocol.tokens:
        ledger.finish()  # the process died between its last charge and this line
        return None
    return ledger


def _started_or_resumed(
    ensemble: Path, header: RunHeader, protocol: FixedMixture, count: Callable[[RunHeader, bool], object]
) -> Ledger | None:
    """Start or resume the ledger. ``Ledger.open`` would not do: the note must be written before a new ledger."""
    path, note, planned = RunFolder(ensemble).ledger, RunFolder(ensemble).served, planned_answers(protocol)
    ledger: Ledger | None
    known = _read_note(note)
    if known is None and path.exists():
        problem = "is missing, and the ledger by itself cannot show that it is the newest copy"
        raise LedgerError(f"{note}: {problem}. Fix: restore it with the ledger; or {fresh_start(ensemble)}.")
    if known and known.releases == 0 and path.exists():
        discard_unborn(path)
    if not path.exists():
        if known and known.releases:
            gone = f"{path}: is gone, but this ensemble has answered"
            raise LedgerError(f"{gone}. Fix: restore it; or {fresh_start(ensemble)}.")
        if known:  # killed before the ledger had its first line: the register may count it already
            header = replace(header, run_id=known.run_id)
        _write_note(note, _Note(header.run_id, 0, None))

        @contextmanager
        def booked() -> Iterator[None]:
            count(header, False)
            yield

        known, ledger = None, Ledger.create(path, header, planned, booked)
    else:
        ledger = None if is_complete(path) else Ledger.resume(path, planned)
    try:
        contents = ledger or read_ledger(path)
        if known is not None:
            _check_known(path, contents, protocol, header, known)
            count(contents.header, contents.releases > 0)
        _note(note, contents, chain_after(path, contents.releases))
    except BaseException:
        if ledger:
            ledger.close()
        raise
    return ledger


def _check_known(
    path: Path, contents: Ledger | LedgerContents, protocol: FixedMixture, header: RunHeader, note: _Note
) -> None:
    """Raise LedgerError unless the ledger is this ensemble's, of this protocol, and no older than its note."""
    check_same_run(path, header, contents.header)
    if set(contents.composition) - {protocol.release}:
        problem = "was started with other settings (protocol)"
        raise LedgerError(f"{path}: {problem}. Fix: restore the earlier settings; or {fresh_start(path.parent)}.")
    if note.run_id != contents.header.run_id:
        raise LedgerError(
            f"{path}: is not the ledger that this ensemble answered from. Fix: restore the ledger that it used."
        )
    cut = contents.releases < note.releases
    if cut or (note.chain is not None and chain_after(path, note.releases) != note.chain):
        problem = f"is an older or another copy: it holds {contents.releases} tokens, and {note.releases} were answered"
        raise LedgerError(f"{path}: {problem}. Fix: restore the newest.")


@dataclass(frozen=True)
class _Note:
    """The note beside a ledger; ``chain`` is None until the ledger's first line is written."""

    run_id: str
    releases: int
    chain: str | None


def _read_note(note: Path) -> _Note | None:
    """Read the note beside a ledger; None if there is none."""
    if not note.exists():
        return None
    try:
        known = read_json(note)
        found = _Note(str(known["run_id"]), int(known["releases"]), known["chain"])
    except (OSError, ValueError, KeyError, TypeError):
        raise LedgerError(f"{note}: is damaged. Fix: restore it; without it, the ledger cannot be trusted.") from None
    if found.releases < 0 or (found.chain is None and found.releases):
        raise LedgerError(f"{note}: is damaged. Fix: restore it; without it, the ledger cannot be trusted.")
    return found


def _note(note: Path, contents: Ledger | LedgerContents, chain: str | None) -> None:
    _write_note(note, _Note(contents.header.run_id, contents.releases, chain))


def _write_note(path: Path, note: _Note) -> None:
    write_json(path, asdict(note))
