"""The study flow: data, public model, experiment, audit and report in one run, which can be put on a schedule.

Where its form says `ask_first`, a run waits until somebody has read what it costs and resumes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput

from dptune.core.digits import at_most
from dptune.core.errors import DptuneError
from dptune.privacy.spent_budgets.register import Register
from flows.audit import audit
from flows.common.command import begin_flow
from flows.common.form import folder_of
from flows.common.pages import progress_page, show_results
from flows.experiment import ALL_STAGES, check_overrides, experiment, make_data
from flows.server import flow
from tasks.experiment.cells import Cell, grid
from tasks.experiment.checks import check_inputs, check_models
from tasks.experiment.spent_budgets import paid_so_far
from tasks.grid import planned_cells, summary
from tasks.paths import DATA, REPORT, SPENT
from tasks.report.experiment import PAGE, report
from tasks.settings.params import load_settings
from tasks.split_records import records_digest

_DAY = 24 * 60 * 60
_PARTS = ("data", "experiment", "audit", "report")


@task(name="report", task_run_name="report")
def write_report(name: str, folder: Path = DATA) -> str:
    """Write the report on the cells that ``folder`` lists. Returns its path."""
    report(name, folder)
    return str(folder / REPORT.name / PAGE)


@flow(name="study", log_prints=True)
def study(params: str = "params.yaml", overrides: dict[str, Any] | None = None, ask_first: bool = False) -> str:
    """Make the data and the public model, tune every cell, attack each, and write the report. Returns its path.

    What is done already is not done again: stages that nothing changed, finished cells, finished audits. The report of
    another study than params.yaml's has a folder of its own, so that data/report stays what `make repro` wrote.

    Args:
        params: the parameter file; it is not written.
        overrides: sections to merge over the parameter file, such as ``{"training": {"epochs": 3}}``.
        ask_first: wait before the first release until somebody resumes the run (``wait_for_approval``).

    Raises: ConfigError for settings that are refused, before any work; FlowError naming what failed.
    """
    begin_flow()
    settings = load_settings(Path(params), overrides)
    check_overrides(overrides or {})
    check_models(settings)
    folder = folder_of(overrides, Path(params))
    show, name, logger = progress_page("study"), settings.experiment.name, get_run_logger()
    reached: list[str] = []

    def on_stage(stage: str) -> None:
        reached.append(stage)
        show(len(reached) / len(ALL_STAGES) / len(_PARTS), f"data: stage {stage}")

    show(0, "data")
    make_data(on_stage)
    check_inputs()
    if ask_first:
        wait_for_approval(overrides, Path(params))
    show(0.25, "experiment")
    experiment.with_options(flow_run_name=lambda: f"cells of {name}")(params=params, overrides=overrides, folder=folder)
    show(0.5, "audit")
    audit.with_options(flow_run_name=lambda: f"audit of {name}")(params=params, overrides=overrides, folder=folder)
    show(0.75, "report")
    path = write_report(name, folder)
    show_results(name, folder)
    show(1, "done")
    logger.info("the report is %s", Path(path).resolve())
    return path


# The price gate, for a run that waits before its first release. Commands such as `make repro` never wait.


class Approval(RunInput):
    """What Prefect's page shows when somebody presses *Resume*: the price, and no field."""


def wait_for_approval(overrides: dict[str, Any] | None, params: Path = Path("params.yaml")) -> None:
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
