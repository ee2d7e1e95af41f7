"""The data of a flow: the DVC stages before it, as a task. Loads no torch: a search runs in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from dptune.core.errors import ConfigError
from flows.child import child
from flows.command import CellError, flow_error
from flows.experiment import run_process

#: The stages that make what the experiment reads; DVC runs those before them too, and none that nothing changed.
DATA_STAGES = ("canaries", "split", "validation", "pretrain", "models")
#: All of them, in DVC's order, for the share that is done.
ALL_STAGES = ("checks", "acquire", "verbalize", "split", "canaries", "validation", "pretrain", "models")
#: Sections that these stages read from params.yaml, and from nowhere else.
_OF_THE_FILE = ("plugins", "data", "canaries", "pretrain")
_STAGE = re.compile(r"(?:Running stage|Stage) '(?P<name>[^']+)'")


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


def check_overrides(overrides: dict[str, Any]) -> None:
    """Raise ConfigError for a section that the data's stages would not see."""
    for section in _OF_THE_FILE:
        if section in overrides:
            fix = "change it in params.yaml, and leave it out here"
            raise ConfigError(f"overrides.{section}", "the data's stages read it only from params.yaml", fix=fix)
