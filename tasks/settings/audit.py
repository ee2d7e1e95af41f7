"""The section `audit`: the attacks on every finished cell."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationInfo, field_validator

from dptune.core.bounds import CountOrZero, Few, Rows, Seed
from tasks.settings.strict import StrictModel

_LEAST = {"shadows": 4, "step_trials": 500}


class Audit(StrictModel):
    """The attacks on every finished cell.

    Attributes:
        confidence: confidence of each lower bound in the report.
        false_alarms: chance that sound ledgers fail the stage, over all cells.
        generations: number of samples of the extraction attack.
        candidates: number of secrets never planted, to rank each planted one against.
        records: number of training records, and of held-out ones, for the membership attacks.
        shadows: number of models that the scores LiRA and RMIA train for themselves: 4 or more, or 0. The bound on
            epsilon uses them only where canaries' gradients are too many for the score by alignment, which finds more.
        step_trials: number of trials of the white-box audit of the private step, in each world: 500 or more, or 0.
        seed: seed of samples and of the choice of records; public.
    """

    confidence: Annotated[float, Gt(0.5), Le(1 - 1e-9)]
    false_alarms: Annotated[float, Ge(1e-9), Lt(1)]
    generations: Rows
    candidates: Few
    records: Annotated[int, Ge(0), Le(10**7)]
    shadows: Annotated[int, Ge(0), Le(10**4)]
    step_trials: CountOrZero
    seed: Seed

    @field_validator("shadows", "step_trials")
    @classmethod
    def _enough(cls, count: int, info: ValidationInfo) -> int:
        least = _LEAST[str(info.field_name)]
        if 0 < count < least:
            raise ValueError(f"{count} is too few: use 0, or {least} or more")
        return count
