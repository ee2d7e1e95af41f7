"""Prepares a cell's run: model, data, calibrated mechanism, schedule and ledger header."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dptune.core.declarations import declared
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora, ScheduleSettings
from dptune.job.base_model import Base, open_base
from dptune.job.run_spec import job_header, largest_batch, mechanism_of, training_plan
from dptune.job.settings import JobSettings
from dptune.mechanisms.agents.rl import idle_agent
from dptune.mechanisms.planning import Schedule
from dptune.mechanisms.registry import of_model
from dptune.mechanisms.versions import versions_of
from dptune.privacy.calibration import check_delta, delta_warning, sampling
from dptune.privacy.entropy import Entropy
from dptune.records.canaries import SECRETS_IN_RECORDS
from dptune.records.parquet_file import form_at, read_about, read_batches, secrets_in_records
from dptune.training.data import Tokens
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.models.own_weights import groups_of
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec, TrainingPlan
from dptune.training.tokens.encoding import encode_stored, encode_stored_labels
from dptune.training.tokens.token_file import FORMAT, Corpus, open_or_tokenize
from tasks.experiment.cells import Cell, federation, of_a_pass, plugin_digest, policy_digest, shared_digests
from tasks.identity import changes
from tasks.paths import EVAL, PUBLIC_VALIDATION, TOKENS, TRAIN
from tasks.settings.experiment import Model, Task, TrainingSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedInputs:
    """The frozen base and the records, which cells of one model and one schedule share. Records are private.

    Attributes:
        cell: one of the cells.
        digests: digests of the model's and the data's files at the time they were read.
        base: the base model as it was checked, with its tokenizer.
        model: the frozen model on its device.
        train: the training records.
        evaluation: the held-out private records.
        validation: the public validation records.
        about: description of the data; public.
    """

    cell: Cell
    digests: dict[str, str]
    base: Base
    model: Any
    train: Corpus
    evaluation: Tokens
    validation: Tokens
    about: dict[str, Any]


def shared_inputs(cell: Cell, device: torch.device) -> SharedInputs:
    """Load the model and records of a cell, and of all cells with its model, LoRA settings, schedule and data.

    Raises: ConfigError if the data, the model or the versions of parts are no longer those the cell was made for, or
    data or model change while they are read.
    """
    digests = shared_digests(cell.model)
    _check_inputs(cell, digests)
    base = open_model(cell.model, job_of(cell, device))  # raises before hours of tokenising
    files = (TRAIN, EVAL, PUBLIC_VALIDATION)
    model, (train, evaluation, validation) = base.load(), (corpus_of(cell, file, base.tokenizer) for file in files)
    about = read_about(TRAIN)
    check_read(
        cell.model, "cell", digests, [token_file(file, digests, cell.training.max_length, cell.task) for file in files]
    )
    return SharedInputs(cell, digests, base, model, train, evaluation.tokens, validation.tokens, about)


def _check_inputs(cell: Cell, digests: dict[str, str]) -> None:
    if changed := changes(cell.versions, versions_of(cell.mechanism, cell.options, cell.training.rule)):
        problem = f"differ from this code's, which would make another run ({changed})"
        raise ConfigError("cell.versions", problem, fix="run the flow again")
    if not digests.items() <= cell.inputs.items():
        raise ConfigError("cell.inputs", "data or model changed since the cell was made", fix="run the flow again")


@dataclass(frozen=True)
class PreparedCell:
    """A cell that is ready to run.

    Attributes:
        spec: the run's specification; ``spec.public`` are the public validation records.
        evaluation: held-out private records.
        about: description of the data; public.
        pairs: names of the modules that train.
        tokenizer: the model's.
    """

    cell: Cell
    spec: RunSpec
    evaluation: Tokens
    about: dict[str, Any]
    pairs: tuple[str, ...]
    tokenizer: Any = None


def prepare(cell: Cell, shared: SharedInputs, entropy: Entropy) -> PreparedCell:
    """Attach the cell's adapters, and calibrate the noise to its budget.

    Raises: ConfigError if the shared inputs are another cell's, if a hyper-policy is no longer the one that the cell
    was made for, or if the run would leak what private telemetry promises to keep.
    """
    _check_inputs(cell, shared.digests)
    for name, setting in of_a_pass(cell).items():
        if setting != of_a_pass(shared.cell)[name]:
            problem = f"differs from {shared.cell.label}'s, beside which {cell.label} is to run"
            raise ConfigError(f"cell.{name}", problem, fix="run it in a process of its own")
    if policy_digest(cell.options) != {key: cell.inputs[key] for key in cell.inputs if key == "policy"}:
        raise ConfigError("init_from", "changed since the cell was made", fix="run the flow again")
    if plugin_digest(cell.mechanism, cell.options) != {k: v for k, v in cell.inputs.items() if k == "plugins"}:
        raise ConfigError("plugins", "changed since the cell was made", fix="run the flow again")
    base, job = shared.base, job_of(cell, shared.base.device, called=str(shared.about["label"]))
    units, expected_batch_size = units_of(cell, shared.train)
    plan = plan_of(cell.training, len(units), expected_batch_size, cell.delta)
    priced = Schedule(plan.sample_rate, plan.steps, cell.delta, plan.law)
    options = of_model(cell.mechanism, cell.options, base.pairs, base.dimension)
    ready = mechanism_of(job, options, priced, cell.accounting)
    mechanism = ready.mechanism
    if cell.accounting == "certified":
        check_delta(cell.delta, len(units), fix="lower experiment.delta")
    for warning in filter(None, (idle_agent(mechanism, plan.steps), delta_warning(cell.delta, len(units)))):
        _log.warning("%s: %s", cell.label, warning)
    try:
        header = job_header(job, ready, units, entropy, priced, cell.accounting)
    except ConfigError as error:
        raise ConfigError(f"experiment.{error.field}", f"{error.problem} ({cell.label})", fix=error.fix) from None
    if secrets_in_records(shared.about):
        header = replace(header, leaks=(*header.leaks, SECRETS_IN_RECORDS))
    frozen = shared_copy(shared.model)
    model = base.start(cell.seed, frozen)
    spec = RunSpec(model, shared.train.tokens, units, mechanism, plan, header, public=shared.validation)
    pairs = tuple(block.name for block in groups_of(spec.model))
    return PreparedCell(cell, spec, shared.evaluation, dict(shared.about), pairs, base.tokenizer)


def job_of(cell: Cell, device: torch.device, **rest: Any) -> JobSettings:
    """The settings of a cell's run, as the library takes them."""
    return job_settings(
        cell.model,
        cell.task,
        cell.lora,
        cell.training,
        str(device),
        epsilon=cell.epsilon,
        delta=cell.delta,
        mechanism=cell.mechanism,
        options=cell.options,
        telemetry=cell.telemetry,
        seed=cell.seed,
        **rest,
    )


def plan_of(training: TrainingSettings, units: int, expected_batch_size: float, delta: float) -> TrainingPlan:
    """The public schedule of a run on ``units`` privacy units."""
    sample_rate, steps = sampling(units, expected_batch_size, training.epochs)
    return training_plan(
        training,
        sample_rate=sample_rate,
        expected_batch_size=expected_batch_size,
        steps=steps,
        max_batch=largest_batch(training, sample_rate, steps, delta, units),
    )


def units_of(cell: Cell, corpus: Corpus) -> tuple[PrivacyUnits, float]:
    """The units of privacy of a cell, and the expected number of units of a batch.

    An audit canary that its coin left out is a unit without records. Slots of crafted canaries are added later.
    """
    found, expected_batch_size = _units_of_records(cell, corpus)
    return found.with_slots(np.zeros(cell.crafted, dtype=bool)), expected_batch_size


def _units_of_records(cell: Cell, corpus: Corpus) -> tuple[PrivacyUnits, float]:
    clients = federation(cell)
    if clients is not None:
        return PrivacyUnits.clients(clients.clients, corpus.units, corpus.absent), clients.clients_per_round
    # A record that is a unit of its own is dealt by the same key: its content's, or its own patient's number.
    most = cell.training.records_per_unit
    return PrivacyUnits.of(cell.unit, corpus.units, most, corpus.absent), cell.training.expected_batch_size


def corpus_of(cell: Cell, records: Path, tokenizer: Any) -> Corpus:
    """The token ids of a file of records, shared by all cells with this model, data and length."""
    limit = cell.training.max_length
    corpus = corpus_at(token_file(records, cell.inputs, limit, cell.task), records, tokenizer, limit, cell.task)
    tokens = corpus.tokens
    if tokens.truncated and cell.telemetry == "research":
        _log.warning("%d of %d records exceed %d tokens and were cut", tokens.truncated, len(tokens.rows), limit)
    return corpus


def corpus_at(path: Path, records: Path, tokenizer: Any, max_length: int, task: Task | None = None) -> Corpus:
    """The token ids of a file of records, opened at ``path`` or written there first. Private.

    Args:
        path: see ``token_file``.
        task: the task of cells; None: to write texts.
    """
    about = read_about(records)
    form = form_at(about)
    batches = partial(read_batches, records, ("record", "unit", "text"))
    stored = partial(encode_stored, form=form, file=str(about["label"]), max_length=max_length)
    if task and task.classifies:
        labels = task.labels
        stored = partial(encode_stored_labels, file=str(about["label"]), max_length=max_length, labels=labels)
    return open_or_tokenize(path, batches, tokenizer, max_length, None if form == "text" else stored)


def token_file(records: Path, inputs: Mapping[str, str], max_length: int, task: Task | None = None) -> Path:
    """The path of a token file, whose name depends on all that decides its content. The data's digest in it is keyed
    by a secret (``cells.digests``), so that nobody can test a guess of the records against the name.
    """
    of_labels = [task.labels, bool(task.words)] if task and task.classifies else []
    content = json.dumps([FORMAT, inputs["data"], inputs["model"], max_length, *of_labels])
    return TOKENS / f"{records.stem}-{hashlib.sha256(content.encode()).hexdigest()[:32]}.arrow"


def check_read(model: Model, field: str, inputs: Mapping[str, str], files: Iterable[Path]) -> None:
    """Check, after they were read, that data and model are still those of ``inputs``; else remove the token files.

    They may hold the new records under the old name. Raises: ConfigError.
    """
    if shared_digests(model).items() <= inputs.items():
        return
    for file in files:
        file.unlink(missing_ok=True)
    raise ConfigError(f"{field}.inputs", "data or model changed while they were read", fix="run the flow again")


# The base model of a cell, and the settings of its job.


def job_settings(
    model: Model, task: Task | None, lora: Lora, training: ScheduleSettings, device: str, **rest: Any
) -> JobSettings:
    """The settings of a run of the pipeline as the library takes them.

    Args:
        task: what cells learn; None: to write texts.
        rest: further settings, such as ``mechanism`` and ``epsilon``.

    Raises: ConfigError for settings that do not go together.
    """
    labelled: dict[str, Any] = {"task": "classify", "labels": task.labels} if task and task.classifies else {}
    if task and task.words:
        labelled["words"] = dict(zip(task.labels, task.words, strict=True))
    return JobSettings(
        device=device,
        dtype=model.dtype,
        load_in_4bit=model.load_in_4bit,
        **{name: getattr(training, name) for name in declared(ScheduleSettings)},
        **(vars(lora) if training.train == "lora" else {}),
        **labelled,
        **rest,
    )


def open_model(model: Model, settings: JobSettings) -> Base:
    """Check a cell's model and tokenizer, without reading weights. Raises: ConfigError as ``open_base``."""
    return open_base(model.source, settings, model.revision)
