"""A base, a corpus and an ensemble so small that all of it is made in a few seconds."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch

from dptune.core.settings import Lora, Pretraining, ShardTuning
from dptune.job.base_model import Base, open_base
from dptune.job.settings import JobSettings
from dptune.prediction.ensemble import Manifest, partition, tune_shard, write_manifest
from dptune.prediction.protocols import FixedMixture
from dptune.training.data import tokenize
from dptune.training.models.model import ModelSource, frozen_fingerprint, load_base, load_tokenizer
from dptune.training.models.pretrain import pretrain

LORA = Lora(rank=2, alpha=4, dropout=0.0)
WIDTH = 24
PROTOCOL = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "alpha": 3.0,
    "tokens": 12,
    "models": 3,
    "public_weight": 0.2,
    "unit": "shard",
}


def texts(count: int, seed: int, words: tuple[str, ...] = ("red", "blue", "old", "new", "cat", "dog")) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(words, size=6)) + "." for _ in range(count)]


@lru_cache(maxsize=1)
def base() -> ModelSource:
    """A public model of random sentences, in a folder of its own."""
    folder = Path(mkdtemp(prefix="dptune tiny base "))
    plan = Pretraining(vocabulary=300, layers=1, width=16, heads=2, max_length=WIDTH, epochs=1, batch_size=16)
    pretrain(texts(64, 0), texts(8, 1), plan, folder)
    return ModelSource(str(folder))


def opened(lora: Lora = LORA, source: str = "") -> Base:
    """The model as a run opens it for these adapters."""
    schedule = {"expected_batch_size": 8, "epochs": 3, "max_length": WIDTH, "records_per_unit": 1}
    return open_base(source or base().source, JobSettings(device="cpu", dtype="float32", **schedule, **vars(lora)))


def build(folder: Path, shards: list[list[str]] | None = None, **protocol: Any) -> Path:
    """An ensemble of one shard for each list of texts, whole; by default three shards, the last one empty."""
    chosen = PROTOCOL | protocol
    if shards is None:
        records = texts(30, 2, ("cat", "dog", "zebra"))
        dealt = partition(records, np.arange(30), "record", 2, b"salt")
        shards = [*([records[index] for index in shard] for shard in dealt), []]
    tokenizer = load_tokenizer(base())
    for number, shard in enumerate(shards):
        tokens = tokenize(shard, tokenizer, WIDTH) if shard else tokenize(["x"], tokenizer, WIDTH)
        if not shard:
            tokens.rows.clear()
        tune_shard(opened(), ShardTuning(epochs=3, learning_rate=0.05), tokens, number, "record", folder)
    write_manifest(folder, manifest(**(chosen | {"models": len(shards)})))
    return folder


def manifest(**protocol: Any) -> Manifest:
    fingerprint = frozen_fingerprint(load_base(base(), torch.device("cpu")))
    FixedMixture(**protocol)  # refuses what cannot be
    return Manifest(
        models=protocol["models"],
        key="record",
        base=fingerprint,
        source=base().source,
        revision=None,
        dtype="float32",
        data="SYNTHETIC words",
        protocol=protocol,
    )
