"""The schedule by which every shard's adapter is tuned. No torch, so that settings can be checked without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dptune.core.declarations import LearningRate, Rows, Seed


@dataclass(frozen=True)
class ShardTuning:
    """Settings for the training of each shard's adapter. Public.

    Attributes:
        epochs: number of passes over the shard.
        batch_size: number of records in each step.
        learning_rate: the highest learning rate of the schedule.
        seed: seed of initialisation and of the order of records, to which shard i adds i.
        schedule: learning rates over the steps: "one_cycle" (warm-up, then a cosine), or "linear" down to 0, as in
            PMixED's paper.
    """

    epochs: Rows = 15
    batch_size: Rows = 8
    learning_rate: LearningRate = 2e-4
    seed: Seed = 0
    schedule: Literal["one_cycle", "linear"] = "one_cycle"
