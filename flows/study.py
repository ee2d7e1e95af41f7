"""The study flow: data, public model, experiment, audit and report in one run, which can be put on a schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from dptune.errors import ConfigError
from flows.audit import audit
from flows.child import child
from flows.experiment import experiment, run_process
from flows.failures import CellError, flow_error
from flows.pages import show_results
from flows.progress_page import progress_page
from flows.server import end_server_with_me
from tasks.experiment.checks import check_inputs, check_models
from tasks.paths import REPORT
from tasks.report.experiment import PAGE, report
from tasks.settings.params import load_settings

#: The stages that make what the experiment reads; DVC runs those before them too, and none that nothing changed.
DATA_STAGES = ("canaries", "split", "validation", "pretrain")
#: All of them, in DVC's order, for the share that is done.
_ALL_STAGES = ("checks", "acquire", "verbalize", "split", "canaries", "validation", "pretrain")
#: Sections that these stages read from params.yaml, and from nowhere else.
_OF_THE_FILE = ("plugins", "data", "canaries", "pretrain")
_STAGE = re.compile(r"(?:Running stage|Stage) '(?P<name>[^']+)'")
_PARTS = ("data", "experiment", "audit", "report")


@task(name="data", task_run_name="data and public model", cache_policy=NO_CACHE)
def make_data(on_stage: Callable[[str], None], stages: Sequence[str] = DATA_STAGES) -> None:
    """Run the DVC stages that the experiment reads from, where something changed.

    Args:
        on_stage: called with the name of each stage that DVC comes to.
        stages: the last ones, for work that reads fewer.

    Raises: FlowError with the cause of the stage that failed.
    """

    def look(line: str) -> None:
        if found := _STAGE.match(line):
            on_stage(found["name"])

    try:
        run_process("data", child("dvc", "repro", *stages), on_line=look)
    except CellError as error:
        raise flow_error("the data could not be made", [error]) from error


@task(name="report", task_run_name="report")
def write_report(name: str) -> str:
    """Write the report on the cells that were run last. Returns its path."""
    report(name)
    return str(REPORT / PAGE)


@flow(name="study", log_prints=True)
def study(params: str = "params.yaml", overrides: dict[str, Any] | None = None) -> str:
    """Make the data and the public model, tune every cell, attack each, and write the report. Returns its path.

    What is done already is not done again: stages that nothing changed, finished cells, finished audits.

    Args:
        params: the parameter file; it is not written.
        overrides: sections to merge over the parameter file, such as ``{"training": {"epochs": 3}}``.

    Raises: ConfigError for settings that are refused, before any work; FlowError naming what failed.
    """
    end_server_with_me()
    settings = load_settings(Path(params), overrides)
    check_overrides(overrides or {})
    check_models(settings)
    show, name, logger = progress_page("study"), settings.experiment.name, get_run_logger()
    reached: list[str] = []

    def on_stage(stage: str) -> None:
        reached.append(stage)
        show(len(reached) / len(_ALL_STAGES) / len(_PARTS), f"data: stage {stage}")

    show(0, "data")
    make_data(on_stage)
    check_inputs()
    show(0.25, "experiment")
    experiment.with_options(flow_run_name=lambda: f"cells of {name}")(params=params, overrides=overrides)
    show(0.5, "audit")
    audit.with_options(flow_run_name=lambda: f"audit of {name}")(params=params, overrides=overrides)
    show(0.75, "report")
    path = write_report(name)
    show_results(name)
    show(1, "done")
    logger.info("the report is %s", Path(path).resolve())
    return path


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ConfigError for a section that the data's stages would not see."""
    for section in _OF_THE_FILE:
        if section in overrides:
            fix = "change it in params.yaml, and leave it out here"
            raise ConfigError(f"overrides.{section}", "the data's stages read it from params.yaml alone", fix=fix)
