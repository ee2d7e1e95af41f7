"""The section `training`: the schedule that all cells share."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le

from dptune.bounds import Count, CountOrZero, Epochs, LearningRate, Rows, TokenCount
from tasks.settings.strict import StrictModel


class TrainingSettings(StrictModel):
    """The schedule that all cells share; ``tasks.experiment.prepare.plan_of`` makes a run's plan of it.

    Attributes:
        expected_batch_size: expected number of units of a batch; each enters by its own coin.
        epochs: expected number of batches that each unit is in.
        max_length: width of every batch in tokens; longer records are cut, never split.
        records_per_unit: the most records that one unit puts into a batch, where the unit is a column.
        learning_rate: AdamW's learning rate, for mechanisms that name none of their own.
        warmup_steps: steps of linear warm-up.
        physical_batch_size: rows of every micro-batch, filled up; changes memory and speed, no result.
        checkpoint_every: steps between checkpoints: the most that a killed run loses.
        evaluate_every: steps between points of the learning curves.
        evaluate_records: records behind each such point; the last one uses all.
        autocast: "bfloat16" runs the forward pass in it; None is float32.
        gradient_checkpointing: compute activations again in the backward pass, which takes time and saves memory;
            changes no result.
    """

    expected_batch_size: Annotated[float, Ge(1e-3), Le(1e9)]
    epochs: Epochs
    max_length: Annotated[TokenCount, Ge(3)]
    records_per_unit: Rows
    learning_rate: LearningRate
    warmup_steps: CountOrZero
    physical_batch_size: Rows
    checkpoint_every: Count
    evaluate_every: Count
    evaluate_records: Count
    autocast: Literal["bfloat16"] | None = None
    gradient_checkpointing: bool = False
