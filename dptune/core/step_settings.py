"""Schedule of a run and settings of its steps. It imports no torch, so that settings can use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from dptune.core.bounds import Count, CountOrZero, Epochs, LearningRate, Rows, TokenCount
from dptune.core.declarations import NAMES_NOTHING, part_of
from dptune.core.update_rule import UpdateRule

#: Tokens that count in the loss.
LossOn = Literal["completion", "assistant", "all"]
BatchSize = Annotated[float, Ge(1e-3), Le(1e9)]
Width = Annotated[TokenCount, Ge(3)]

#: Version of the training loop (``dptune.training``, tokens and adapters included). Raise it when a change moves a
#: released number of every run: tests/golden says when.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Rate, micro-batches, precision and checkpoints of a run. Public.

    Attributes:
        learning_rate: learning rate after warm-up.
        warmup_steps: steps of linear warm-up.
        physical_batch_size: rows of every micro-batch, filled up where units are fewer; changes memory and speed only.
        checkpoint_every: steps between checkpoints: the most that a killed run loses.
        autocast: "bfloat16" runs the forward pass in bfloat16; left out, it runs in the dtype of the weights.
        gradient_checkpointing: keep only the inputs of transformer layers and run each layer again on the way back:
            less memory, more time, the same gradients.
    """

    learning_rate: LearningRate = 5e-4
    warmup_steps: CountOrZero = 100
    # It moves the last digits of float32 sums; which masks dropout draws follows the system's entropy anyway. The
    # default is for models of any size; params.yaml has 32, for its small one.
    physical_batch_size: Rows = field(default=16, metadata=NAMES_NOTHING)
    checkpoint_every: Count = field(default=50, metadata=NAMES_NOTHING)  # it decides only what a kill loses
    autocast: Literal["bfloat16"] | None = None
    gradient_checkpointing: bool = field(default=False, metadata=NAMES_NOTHING)  # the same products, made twice


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(StepSettings, UpdateRule):
    """Schedule of a private run, as every door that trains takes it. Public.

    Attributes:
        expected_batch_size: expected number of units of a batch; each enters by its own coin.
        epochs: expected number of batches that each unit is in.
        max_length: width of every batch in tokens, one of which stays padding; longer records are cut, never split.
        records_per_unit: most records that one unit brings to a batch, where the unit is a column.
    """

    expected_batch_size: BatchSize
    epochs: Epochs
    max_length: Width
    records_per_unit: Rows

    @property
    def rule(self) -> UpdateRule:
        """Optimiser, schedule of the learning rate and average of the weights."""
        return part_of(UpdateRule, self)
