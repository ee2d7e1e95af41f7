"""Loads a finished cell for attacks: adapter, base model, ledger and secrets, checked to belong to one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict

from dptune.audit.text.likelihood import Passage, canary_passage
from dptune.core.errors import DataError
from dptune.core.files import read_json, sha256
from dptune.job.delivery.adapter_loading import with_trained
from dptune.job.delivery.weights import LORA, adapter_digest, weights_file
from dptune.job.result import RunResult
from dptune.privacy.ledger_file import LedgerContents, LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder, fresh_start
from dptune.records.canaries import Secrets, read_secrets
from dptune.records.diabetes.narratives import PLAIN
from dptune.records.parquet_file import form_at, read_about
from dptune.training.models.weight_files import read_tensors
from tasks.experiment.cells import Cell, digests, plugin_digest
from tasks.experiment.preparation import job_of, open_model
from tasks.paths import MANIFEST, TRAIN, planted_secrets
from tasks.settings.experiment import Audit


@dataclass
class Target:
    """A finished cell under attack.

    Attributes:
        directory: the cell's folder.
        checks: number of comparisons of all cells, which share the chance of a false alarm.
        seeds: number of cells that differ from this one by their seed alone, with itself.
        contents: content of the ledger.
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
    adapted: Any
    public: Any
    tokenizer: Any
    secrets: Secrets = field(repr=False)
    source: str
    form: str
    fixed: bool = False
    template: str = PLAIN
    seeds: int = 1

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
        adapted=adapted,
        public=opened.load().eval(),
        tokenizer=opened.tokenizer,
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
    if file.name == LORA.weights and names != set(get_peft_model_state_dict(adapted)):
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
