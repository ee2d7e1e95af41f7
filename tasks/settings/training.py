"""The section `training`: the schedule that all cells share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from annotated_types import Ge, Le

from dptune.bounds import Count, Epochs, Rows, TokenCount
from dptune.step_settings import StepSettings
from dptune.update_rule import UpdateRule
from tasks.settings.library_section import part_of

#: Settings of the update rule.
RULE = tuple(item.name for item in fields(UpdateRule))
#: Entries that params.yaml must have.
REQUIRED = (
    *("expected_batch_size", "epochs", "max_length", "records_per_unit", "learning_rate", "warmup_steps"),
    *("physical_batch_size", "checkpoint_every", "evaluate_every", "evaluate_records"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(StepSettings, UpdateRule):
    """The schedule that all cells share; ``tasks.experiment.prepare.plan_of`` makes a run's plan of it.

    A mechanism's entry may name its own learning rate and update rule.

    Attributes:
        expected_batch_size: expected number of units of a batch; each enters by its own coin.
        epochs: expected number of batches that each unit is in.
        max_length: width of every batch in tokens; longer records are cut, never split.
        records_per_unit: the most records that one unit puts into a batch, where the unit is a column.
        evaluate_every: steps between points of the learning curves.
        evaluate_records: records behind each such point; the first and last figures use all, or ``final_records``.
        final_records: the most records behind those figures, evenly spread over all; None takes all of them.
    """

    expected_batch_size: Annotated[float, Ge(1e-3), Le(1e9)]
    epochs: Epochs
    max_length: Annotated[TokenCount, Ge(3)]
    records_per_unit: Rows
    evaluate_every: Count
    evaluate_records: Count
    final_records: Count | None = None

    @property
    def rule(self) -> UpdateRule:
        """Optimiser, schedule of the learning rate and average of the weights."""
        return part_of(UpdateRule, self)
