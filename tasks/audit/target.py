"""Targets of attacks: a finished cell, whose parts are checked to belong to one run, and shadow models of its kind.

Shadow models are the attacker's own runs, on records and coins of their own, for the likelihood-ratio attacks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import get_peft_model_state_dict

from dptune.audit.text.likelihood import Passage, canary_passage, ending_losses
from dptune.audit.text.membership import balanced_coins, lira_scores, rmia
from dptune.core.errors import DataError
from dptune.core.files import read_json, sha256
from dptune.core.progress import progress
from dptune.job.base_model import Base
from dptune.job.delivery.adapter_loading import with_trained
from dptune.job.delivery.weights import LORA, adapter_digest, weights_file
from dptune.job.result import RunResult
from dptune.mechanisms.registry import build, of_model
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger_file import LedgerContents, LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder, fresh_start
from dptune.records.canaries import Canary, Secrets, content_with, read_secrets
from dptune.records.diabetes.narratives import PLAIN
from dptune.records.parquet_file import encode_content, form_at, read_about, read_records
from dptune.training.loop import train
from dptune.training.models.own_weights import groups_of
from dptune.training.models.weight_files import read_tensors
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, header_of
from dptune.training.tokens.encoding import stored_tokens
from tasks.experiment.cells import Cell, digests, plugin_digest
from tasks.experiment.preparation import job_of, open_model, plan_of
from tasks.paths import MANIFEST, PUBLIC_VALIDATION, SPLITS, TRAIN, planted_secrets
from tasks.settings.experiment import Audit


@dataclass
class Target:
    """A finished cell under attack.

    Attributes:
        directory: the cell's folder.
        checks: number of comparisons of all cells, which share the chance of a false alarm.
        seeds: number of cells that differ from this one by their seed alone, with itself.
        contents: content of the ledger.
        base: the base model as it was checked, with its tokenizer.
        adapted: the model with the cell's adapter.
        public: the base model, which the attacker has too.
        secrets: the auditor's canaries. Private.
        source: name of the data's source, which decides the public texts that carry secrets.
        template: wording of narratives, theirs and the public texts'.
        form: what the records are: texts, prompts with targets, chats, or labelled texts (``records.FORMS``).
        fixed: whether the held-out records are another part of a benchmark, whose inputs tell them from those that
            trained; attacks then compare with the attack side.
    """

    cell: Cell
    directory: Path
    settings: Audit
    checks: int
    contents: LedgerContents
    base: Base
    adapted: Any
    public: Any
    secrets: Secrets = field(repr=False)
    source: str
    form: str
    fixed: bool = False
    template: str = PLAIN
    seeds: int = 1

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.base.tokenizer

    def confidence(self, bounds: int = 1) -> float:
        """Confidence of one of ``bounds`` lower bounds of a cell on the same figure.

        The report shows the largest over these and over seeds. By the union bound it exceeds the truth with chance
        ``1 - settings.confidence`` at most, however bounds and seeds depend on one another.
        """
        return 1 - (1 - self.settings.confidence) / (bounds * self.seeds)

    @property
    def alarm_confidence(self) -> float:
        """Confidence of the bounds that may call the ledger wrong."""
        return 1 - self.settings.false_alarms / self.checks

    @property
    def rows(self) -> int:
        """Number of rows of a forward pass."""
        return 2 * self.cell.training.physical_batch_size

    def passage(self, carrier: str, secret: str, kind: str = "code") -> Passage:
        """The passage of a canary: its public carrier, and the ending that would be planted."""
        return canary_passage(carrier, secret, self.form, self.tokenizer, kind)


def load_target(directory: Path, settings: Audit, device: torch.device, checks: int, seeds: int = 1) -> Target:
    """Load the cell in ``directory``.

    Raises: DataError if anything is missing, unfinished, damaged, or does not belong together.
    """
    again = "run the experiment stage again"
    folder = RunFolder(directory)
    try:
        cell = Cell.model_validate_json(folder.cell.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError("is missing or not a cell", fix=again, file=folder.cell) from None
    contents = _finished_ledger(cell, directory, again)
    _check_inputs(cell, directory, again)
    base = cell.model.weights
    opened = open_model(cell.model, job_of(cell, device))
    try:
        adapted = with_trained(opened.load(), folder.adapter)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        fix = f"restore it; or {fresh_start(directory)}"
        raise DataError(f"does not fit {base.source} ({reason})", fix=fix, file=folder.adapter) from None
    _check_adapter(adapted, directory)
    about = read_about(TRAIN)
    return Target(
        cell=cell,
        directory=directory,
        settings=settings,
        checks=checks,
        contents=contents,
        base=opened,
        adapted=adapted,
        public=opened.load().eval(),
        secrets=read_secrets(planted_secrets()),
        source=str(about["source"]),
        form=form_at(about),
        fixed=bool(about.get("fixed")),
        template=str(about.get("template", PLAIN)),
        seeds=seeds,
    )


def _check_adapter(adapted: Any, directory: Path) -> None:
    """Check that the adapter's file fits this model, about which PEFT only warns, and is the one that the run wrote."""
    file, fix = weights_file(RunFolder(directory).adapter), f"restore it; or {fresh_start(directory)}"
    names = set(read_tensors(file, fix=fix))
    if file.name == LORA.weights and names != set(get_peft_model_state_dict(adapted, save_embedding_layers=False)):
        raise DataError("its weights belong to another model", fix=fix, file=file)
    result = RunResult.read(RunFolder(directory).result)
    if adapter_digest(directory) != result.adapter_sha256:
        raise DataError("is not what the run of this ledger wrote", fix=fix, file=file)


def _finished_ledger(cell: Cell, directory: Path, fix: str) -> LedgerContents:
    """Read the ledger that the audit checks. Raises: DataError if it is missing, damaged or unfinished."""
    path = RunFolder(directory).ledger
    if not path.exists():
        lost = "is missing: an adapter without its ledger has no epsilon to check"
        raise DataError(lost, fix=f"restore it; or {fresh_start(directory)}", file=path)
    try:
        contents = read_ledger(path)
    except LedgerError as error:
        raise DataError(f"is damaged ({error})", fix=f"restore it; or {fresh_start(directory)}", file=path) from None
    if not contents.complete:
        raise DataError("is not finished", fix=fix, file=path)
    header = contents.header
    if (header.mechanism, header.delta) != (cell.mechanism, cell.delta):
        raise DataError("is the ledger of another cell", fix="restore the cell's own", file=path)
    return contents


def _check_inputs(cell: Cell, directory: Path, fix: str) -> None:
    manifest = read_json(MANIFEST)
    for path, key in ((planted_secrets(), "secrets_sha256"), (TRAIN, "train_sha256")):
        if not path.exists() or sha256(path) != manifest[key]:
            fix = "restore it; or run `dvc repro -f canaries`, after which every cell runs, and spends, again"
            raise DataError("is not what was planted", fix=fix, file=path)
    now = digests(cell.model, cell.options) | plugin_digest(cell.mechanism, cell.options)
    for key, what in (("data", "other data"), ("model", "another base model"), ("plugins", "other plug-ins")):
        if now.get(key) != cell.inputs.get(key):
            more = f"{fix}; the new run adds to what this one spent, and the report counts both"
            raise DataError(f"was trained with {what} than lies here now", fix=more, file=directory)


# Shadow models.


def shadow_scores(
    target: Target,
    canaries: Sequence[Canary],
    passages: Sequence[Passage],
    scores: NDArray[np.float64],
    public: NDArray[np.float64],
) -> dict[str, NDArray[np.float64]]:
    """(canaries,) of the scores that need ``audit.shadows`` shadow models, by name: LiRA of the target's calibrated
    ``scores``, and RMIA with models in and out.

    A shadow is fine-tuned like the cell, but without noise, on those canaries that the attacker's own coins choose and
    on records of nobody in the cell: the attack split, or public records where telemetry is private. It uses no
    training record of a cell, so nothing is charged. Beside the attack split the scores are private: they depend on
    its records. Beside public records they are functions of the adapter, public data and the auditor's secrets.

    Args:
        passages: the passage of each canary.
        public: (canaries,) the base model's losses.
    """
    settings = target.settings
    coins = balanced_coins(settings.shadows, len(passages), np.random.default_rng(settings.seed))
    rows = []
    for index in progress(range(settings.shadows), "shadow models", total=settings.shadows):
        model = _train_shadow(target, canaries, coins[index], index)
        limit = target.cell.training.max_length
        found = ending_losses(model, target.tokenizer, passages, max_length=limit, rows=target.rows)
        rows.append(found.total)
    losses, lengths = np.stack(rows), np.maximum(found.tokens, 1)
    return {
        "shadows": lira_scores(scores, public - losses, coins),
        "rmia": rmia((public - scores) / lengths, losses / lengths, coins),
    }


def _train_shadow(target: Target, canaries: Sequence[Canary], included: NDArray[np.bool_], seed: int) -> Any:
    """Train one shadow model; it is returned in evaluation mode."""
    cell = target.cell
    records = read_records(PUBLIC_VALIDATION if cell.telemetry == "private" else SPLITS / "attack.parquet")
    form = form_at(records.about)
    chosen = [one for one, coin in zip(canaries, included, strict=True) if coin]
    texts = [str(text) for text in records.text.to_pylist()]
    texts += [encode_content(content_with(one.carrier, one.secret, form, one.kind)) for one in chosen]
    label, length = str(records.about["label"]), cell.training.max_length
    tokens = stored_tokens(texts, target.tokenizer, form=form, file=label, max_length=length)
    model = target.base.start(cell.seed)
    units = PrivacyUnits.records(len(texts))
    training = replace(cell.training, sampler="poisson", max_batch=None)  # of other units, and without a price
    plan = plan_of(training, len(units), min(training.expected_batch_size, len(units)), cell.delta)
    blocks, entropy = groups_of(model), FixedSeed(seed)
    dimension = sum(weight.numel() for block in blocks for weight in block.parameters)
    mechanism = build("nonprivate", of_model("nonprivate", {}, len(blocks), dimension))
    header = header_of(mechanism, units, entropy, delta=cell.delta, train=cell.training.trained.said)
    with tempfile.TemporaryDirectory() as directory:
        spec = RunSpec(model, tokens, units, mechanism, replace(plan, checkpoint_every=plan.steps), header)
        train(spec, Path(directory), entropy).close()
    return model.eval()
