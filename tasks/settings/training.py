"""The section `training`: the schedule that all cells share."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from dptune.core.bounds import Count
from dptune.core.declarations import NAMES_NOTHING
from dptune.core.step_settings import ScheduleSettings
from dptune.core.update_rule import UpdateRule

#: Settings of the update rule.
RULE = tuple(item.name for item in fields(UpdateRule))
#: Entries that params.yaml must have.
REQUIRED = (
    *("expected_batch_size", "epochs", "max_length", "records_per_unit", "learning_rate", "warmup_steps"),
    *("physical_batch_size", "checkpoint_every", "evaluate_every", "evaluate_records"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(ScheduleSettings):
    """The schedule that all cells share; ``tasks.experiment.preparation.plan_of`` makes a run's plan of it.

    A mechanism's entry may name its own learning rate and update rule.

    Attributes:
        evaluate_every: steps between points of the learning curves.
        evaluate_records: records behind each point; the first and last figures use all, or final_records.
        final_records: most records behind the first and last figures, evenly spread; left out, all of them.
    """

    evaluate_every: Count = field(metadata=NAMES_NOTHING)  # it decides only where curves have points
    # These two are part of a cell's name, for they move figures by which pages compare cells.
    evaluate_records: Count
    final_records: Count | None = None
