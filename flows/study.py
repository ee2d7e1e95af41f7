"""The study flow: data, public model, experiment, audit and report in one run, which can be put on a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import get_run_logger, task

from flows import price_gate
from flows.audit import audit
from flows.command import begin_flow
from flows.data_stages import ALL_STAGES, check_overrides, make_data
from flows.experiment import experiment
from flows.pages import progress_page, show_results
from flows.runners import folder_of
from flows.server import flow
from tasks.experiment.checks import check_inputs, check_models
from tasks.paths import DATA, REPORT
from tasks.report.experiment import PAGE, report
from tasks.settings.params import load_settings

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
        ask_first: wait before the first release until somebody resumes the run (``price_gate``).

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
        price_gate.ask_first(overrides, Path(params))
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
