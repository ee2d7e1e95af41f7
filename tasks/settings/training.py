"""The section `training`: the schedule that all cells share."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from annotated_types import Ge, Le

from dptune.bounds import Chance, Count, CountOrZero, Epochs, LearningRate, Rows, Share, TokenCount
from dptune.update_rule import Average, Optimizer, PartOfAll, RateSchedule, UpdateRule
from tasks.settings.strict import StrictModel

#: Settings of the update rule.
RULE = tuple(item.name for item in fields(UpdateRule))


class TrainingSettings(StrictModel):
    """The schedule that all cells share; ``tasks.experiment.prepare.plan_of`` makes a run's plan of it.

    Attributes:
        expected_batch_size: expected number of units of a batch; each enters by its own coin.
        epochs: expected number of batches that each unit is in.
        max_length: width of every batch in tokens; longer records are cut, never split.
        records_per_unit: the most records that one unit puts into a batch, where the unit is a column.
        learning_rate: learning rate after warm-up, for mechanisms that name none of their own.
        warmup_steps: steps of linear warm-up.
        physical_batch_size: rows of every micro-batch, filled up; changes memory and speed, no result.
        checkpoint_every: steps between checkpoints: the most that a killed run loses.
        evaluate_every: steps between points of the learning curves.
        evaluate_records: records behind each such point; the last one uses all.
        autocast: "bfloat16" runs the forward pass in it; None is float32.
        gradient_checkpointing: compute activations again in the backward pass, which takes time and saves memory;
            changes no result.
        optimizer: "adamw", "adam_bc" (DP-AdamBC: Adam without the noise in its second moment) or "sgd" with momentum;
            this and what follows, like the learning rate, a mechanism's entry may name for itself.
        momentum: momentum of sgd.
        noise_floor: the least share of the noise in the second moment that adam_bc leaves in it.
        schedule: learning rate after warm-up: "constant", or "linear" or "cosine" to ``final_share`` of it.
        final_share: share of the learning rate that a falling schedule ends at.
        average: the weights that a run ends with: the last ("none"), their moving average ("ema"), or the mean of those
            after the last steps ("tail").
        average_share: share of the steps that a tail averages.
        average_decay: decay of the moving average in a step.
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
    optimizer: Optimizer = "adamw"
    momentum: Chance = 0.9
    noise_floor: PartOfAll = 0.5
    schedule: RateSchedule = "constant"
    final_share: Share = 0.0
    average: Average = "none"
    average_share: PartOfAll = 0.1
    average_decay: Chance = 0.9

    @property
    def rule(self) -> UpdateRule:
        """Optimiser, schedule of the learning rate and average of the weights."""
        return UpdateRule(**{name: getattr(self, name) for name in RULE})
