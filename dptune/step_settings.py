"""What the steps of a run are done with. It imports no torch, so that settings can use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dptune.bounds import Count, CountOrZero, LearningRate, Rows

#: Version of the training loop (``dptune.training``, tokens and adapters included). Raise it when a change moves a
#: released number of every run: tests/golden says when.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Rate, micro-batches, precision and checkpoints of a run. Public.

    Attributes:
        learning_rate: learning rate after warm-up.
        warmup_steps: steps of linear warm-up.
        physical_batch_size: rows of every micro-batch, filled up where units are fewer; changes memory and speed, no
            result.
        checkpoint_every: steps between checkpoints: the most that a killed run loses.
        autocast: "bfloat16" runs the forward pass in it; None is float32.
        gradient_checkpointing: keep the inputs of transformer layers alone, and run each layer again on the way back:
            less memory, more time, and the same gradients.
    """

    learning_rate: LearningRate = 5e-4
    warmup_steps: CountOrZero = 100
    physical_batch_size: Rows = 16
    checkpoint_every: Count = 50
    autocast: Literal["bfloat16"] | None = None
    gradient_checkpointing: bool = False
