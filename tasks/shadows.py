"""Shadow models of the likelihood-ratio attack: the attacker's own runs, on records and coins of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.likelihood import Passage, ending_losses
from dptune.audit.lira import balanced_coins, lira_scores
from dptune.corpus.records import read_records
from dptune.mechanisms.registry import build
from dptune.privacy.calibration import sampling
from dptune.privacy.entropy import FixedSeed
from dptune.privacy.ledger import RunHeader
from dptune.progress import progress
from dptune.training.data import PrivacyUnits, tokenize
from dptune.training.loop import Plan, train
from dptune.training.model import BaseModel, Lora, attach_lora, load_base, load_tokenizer
from tasks.cells import Cell
from tasks.paths import SPLITS
from tasks.settings import Audit


def shadow_scores(
    cell: Cell, passages: list[Passage], target: NDArray[np.float64], settings: Audit, device: str
) -> NDArray[np.float64]:
    """(canaries,) likelihood ratios of the target's calibrated scores, by ``settings.shadows`` shadow models.

    A shadow is fine-tuned like the cell, but without noise, on the attack split (which no cell is trained on), where
    the attacker's own coins put a canary in place of its host, or nothing. Only the attacker's data are used:
    nothing is charged.
    """
    generator = np.random.default_rng(settings.seed)
    coins = balanced_coins(settings.shadows, len(passages), generator)
    base = BaseModel(cell.model.source, cell.model.revision, cell.model.dtype)
    tokenizer = load_tokenizer(base)
    public = _scores(load_base(base, torch.device(device)).eval(), tokenizer, passages, cell)
    rows = [
        _scores(_trained(cell, base, tokenizer, passages, coins[index], index, device), tokenizer, passages, cell)
        - public
        for index in progress(range(settings.shadows), "shadow models", total=settings.shadows)
    ]
    return lira_scores(target, np.stack(rows), coins)


def _scores(model: Any, tokenizer: Any, passages: list[Passage], cell: Cell) -> NDArray[np.float64]:
    rows = 2 * cell.training.physical_batch_size
    return -ending_losses(model, tokenizer, passages, max_length=cell.training.max_length, rows=rows).total


def _trained(
    cell: Cell,
    base: BaseModel,
    tokenizer: Any,
    passages: list[Passage],
    included: NDArray[np.bool_],
    seed: int,
    device: str,
) -> Any:
    """One shadow model in evaluation mode."""
    hosts = {passage.prompt for passage in passages}
    texts = [text for text in read_records(SPLITS / "attack.parquet").text.to_pylist() if text not in hosts]
    texts += [p.prompt + p.ending for p, chosen in zip(passages, included, strict=True) if chosen]
    training = cell.training
    tokens = tokenize(texts, tokenizer, training.max_length)
    model = attach_lora(load_base(base, torch.device(device)), Lora(**cell.lora.model_dump()), cell.seed)
    units = PrivacyUnits.of("encounter", np.arange(len(texts)), 1)
    sample_rate, steps = sampling(len(units), min(training.expected_batch_size, len(units)), training.epochs)
    mechanism, entropy = build("nonprivate", {}), FixedSeed(seed)
    plan = Plan(
        sample_rate=sample_rate,
        expected_batch_size=sample_rate * len(units),
        steps=steps,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        physical_batch_size=training.physical_batch_size,
        checkpoint_every=steps,
        autocast=training.autocast,
    )
    header = RunHeader(
        mechanism="nonprivate",
        published_accountant=mechanism.published_accountant,
        accounting="certified",
        epsilon=None,
        delta=cell.delta,
        unit=units.kind,
        units=len(units),
        leaks=entropy.leaks,
    )
    with tempfile.TemporaryDirectory() as directory:
        train(model, tokens, units, mechanism, plan, header, Path(directory), entropy).close()
    return model.eval()
