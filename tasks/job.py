"""A cell made ready to run: model, data, calibrated mechanism, schedule and ledger header."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dptune.corpus.records import Records, read_records
from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated, Schedule, calibrated, planned
from dptune.mechanisms.registry import build, lacks_noise, of_model, takes_noise
from dptune.privacy.calibration import sampling
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import RunHeader
from dptune.training.data import PrivacyUnits, Tokens, tokenize
from dptune.training.loop import Plan
from dptune.training.model import BaseModel, Lora, attach_lora, load_base, load_tokenizer
from dptune.training.per_sample import lora_pairs
from tasks.cells import Cell, digests
from tasks.paths import EVAL, PUBLIC_VALIDATION, TRAIN
from tasks.settings import Training

_log = logging.getLogger(__name__)


@dataclass
class Job:
    """A cell made ready to run."""

    cell: Cell
    model: Any
    mechanism: Mechanism
    plan: Plan
    header: RunHeader
    units: PrivacyUnits
    train: Tokens
    evaluation: Tokens
    validation: Tokens
    about: dict[str, Any]
    pairs: tuple[str, ...]


def prepare(cell: Cell, device: torch.device, entropy: Entropy) -> Job:
    """Load model and data, and calibrate the noise to the cell's budget.

    Raises: ConfigError if the data or model are no longer those the cell was made for, or the run would leak
    what private telemetry promises to keep.
    """
    if digests(cell.model, cell.options) != cell.inputs:
        raise ConfigError(
            "cell.inputs", "data, model or code changed since the cell was made", fix="run the flow again"
        )
    base = BaseModel(cell.model.source, cell.model.revision, cell.model.dtype)
    tokenizer = load_tokenizer(base)
    records = read_records(TRAIN)
    model = attach_lora(load_base(base, device), Lora(**cell.lora.model_dump()), cell.seed)
    units, expected_batch_size = _units(cell, records)
    plan = plan_of(cell.training, len(units), expected_batch_size)
    adapters = lora_pairs(model)
    pairs = tuple(pair.name for pair in adapters)
    dimension = sum(parameter.numel() for pair in adapters for parameter in pair.parameters)
    schedule = Schedule(plan.sample_rate, plan.steps, cell.delta)
    options = of_model(cell.mechanism, cell.options, len(pairs), dimension)
    ready = _calibrated(cell, options, schedule)
    mechanism = ready.mechanism
    header = RunHeader(
        mechanism=cell.mechanism,
        published_accountant=mechanism.published_accountant,
        accounting=cell.accounting,
        epsilon=cell.epsilon,
        delta=cell.delta,
        unit=units.kind,
        units=len(units),
        data=str(records.about["label"]),
        telemetry=cell.telemetry,
        leaks=entropy.leaks,
        renyi_filter=ready.renyi_filter,
        inherited=tuple(mechanism.controller.inherited.items()),
    )
    leaks = header.leaks_of(planned(mechanism, schedule))
    if cell.telemetry == "private" and leaks:
        raise ConfigError(
            "experiment.telemetry",
            f"private cannot hold for {cell.label}: {'; '.join(leaks)}",
            fix="leave that mechanism out, or use research",
        )
    return Job(
        cell=cell,
        model=model,
        mechanism=mechanism,
        plan=plan,
        header=header,
        units=units,
        train=_tokens(cell, records, tokenizer),
        evaluation=_tokens(cell, read_records(EVAL), tokenizer),
        validation=_tokens(cell, read_records(PUBLIC_VALIDATION), tokenizer),
        about=dict(records.about),
        pairs=pairs,
    )


def plan_of(training: Training, units: int, expected_batch_size: float) -> Plan:
    """The public schedule of a run on ``units`` privacy units."""
    sample_rate, steps = sampling(units, expected_batch_size, training.epochs)
    return Plan(
        sample_rate=sample_rate,
        expected_batch_size=expected_batch_size,
        steps=steps,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        physical_batch_size=training.physical_batch_size,
        checkpoint_every=training.checkpoint_every,
        autocast=training.autocast,
    )


def _units(cell: Cell, records: Records) -> tuple[PrivacyUnits, float]:
    """Whose privacy, and how many of them a batch expects."""
    # An audit canary that its coin left out.
    absent = np.array([text == "" for text in records.text.to_pylist()])
    noise = {"noise_multiplier": 1.0} if lacks_noise(cell.mechanism, cell.options) else {}
    local = build(cell.mechanism, noise | cell.options).local
    if local is not None:
        return PrivacyUnits.clients(local.clients, records.patient, absent), local.clients_per_round
    training = cell.training
    units = PrivacyUnits.of(cell.unit, records.patient, training.encounters_per_patient, absent)
    return units, training.expected_batch_size


def _tokens(cell: Cell, records: Records, tokenizer: Any) -> Tokens:
    limit = cell.training.max_length
    tokens = tokenize(records.text.to_pylist(), tokenizer, limit)
    if tokens.truncated and cell.telemetry == "research":
        _log.warning("%d of %d records exceed %d tokens and were cut", tokens.truncated, len(tokens.rows), limit)
    return tokens


def _calibrated(cell: Cell, options: dict[str, Any], schedule: Schedule) -> Calibrated:
    if cell.epsilon is None or "noise_multiplier" in options or not takes_noise(cell.mechanism, options):
        return Calibrated(build(cell.mechanism, options))
    return calibrated(
        lambda noise: build(cell.mechanism, options | {"noise_multiplier": noise}),
        cell.epsilon,
        schedule,
        cell.accounting,
    )
