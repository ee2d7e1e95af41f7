"""Price gate: a run that waits, before its first release, for somebody who read what it costs and resumes it.

A form asks for it by its field `ask_first`; commands such as `make repro` never wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput

from dptune.core.digits import at_most
from dptune.core.errors import DptuneError
from dptune.privacy.spent_budgets.register import Register
from tasks.experiment.cells import Cell, grid
from tasks.experiment.spent_budgets import paid_so_far
from tasks.grid import planned_cells, summary
from tasks.paths import SPENT
from tasks.settings.params import load_settings
from tasks.split_records import records_digest

_DAY = 24 * 60 * 60


class Approval(RunInput):
    """What Prefect's page shows when somebody presses *Resume*: the price, and no field."""


def ask_first(overrides: dict[str, Any] | None, params: Path = Path("params.yaml")) -> None:
    """Pause the run until somebody resumes it on its page; at once, where no cell would make a release.

    Raises: DptuneError if nobody resumes it within a day; nothing is spent then.
    """
    settings = load_settings(params, overrides)
    price = price_of(grid(settings), private=settings.experiment.telemetry == "private")
    if price is None:
        return
    get_run_logger().info("waiting for approval: %s", price)
    try:
        pause_flow_run(wait_for_input=Approval.with_initial_data(description=price), timeout=_DAY)
    except FlowPauseTimeout:
        fix = "start the run again, and press Resume on its page"
        raise DptuneError(
            f"ask_first: nobody approved the price within a day, and nothing was spent. Fix: {fix}."
        ) from None


def price_of(cells: Sequence[Cell], *, private: bool) -> str | None:
    """What running the cells adds, and what the records then paid in all; None where nothing is left to be released.

    Args:
        private: whether to leave out what these records paid, which is private under private telemetry.
    """
    planned = planned_cells(cells)
    if not any(one.left for one in planned):
        return None
    before = [] if private else Register(SPENT).earlier(records_digest())
    # Cells without a budget, or by another accounting, and records that paid without a bound, have no total.
    added = [
        one.cell.epsilon if one.cell.accounting == "certified" and one.cell.epsilon is not None else math.inf
        for one in planned
        if one.left
    ]
    total = math.fsum([*(one.epsilon for one in before), *added])
    sentences = [summary(planned)]
    if before and math.isfinite(total):
        in_all = f"these records then paid at most epsilon {at_most(total)} in all"
        sentences.append(f"With what they paid before, {in_all}.")
    if paid := paid_so_far(private=private):
        sentences.append(f"So far: {paid}.")
    return " ".join(sentences)
