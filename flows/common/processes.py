"""Parts of a flow's work: processes that share what a plan lists, as many at a time as cells train."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from dptune.core.errors import DptuneError
from flows.common.child import child
from flows.common.command import CellError
from flows.common.runners import available_devices, error_of, free_place, run_process, with_threads
from tasks.settings.experiment import Experiment

#: What to do where a part's work is under way in another flow.
WAIT = "wait for its end, and run again"


async def worth_retrying(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed task may do better when it is tried again: not one whose input must be mended."""
    try:
        await state.aresult()
    except CellError as error:
        return not error.hopeless
    except DptuneError:
        return False
    except Exception:
        return True
    return False


@task(name="part", task_run_name="{label}", cache_policy=NO_CACHE, retry_condition_fn=worth_retrying)
def run_part(
    label: str,
    module: str,
    plan: Path,
    part: int,
    parts: int,
    devices: list[str],
    places: int,
    on_line: Callable[[str], None],
) -> None:
    """Run one part in a process of its own, on the first free device."""
    with free_place(devices, places) as device:
        command = child(module, str(plan), str(part), str(parts), "--device", device)
        run_process(label, command, environment=with_threads(os.environ, parts), on_line=on_line)


def run_parts(
    what: str,
    module: str,
    plan: Path,
    items: int,
    settings: Experiment,
    on_line: Callable[[str], None] = lambda line: None,
) -> list[BaseException]:
    """Make what a plan lists by as many processes as there are places for cells, and wait for all of them.

    Args:
        what: what is made, for names of tasks and for the log.
        module: what each process runs, with plan, number and count of its part, and ``--device``.
        items: number of things that are not made yet.
        on_line: called with each line that a process prints.

    Returns: the errors of the parts that failed.
    """
    devices, places = available_devices(settings), settings.cells_per_device
    parts = min(len(devices) * places, items)
    configured = run_part.with_options(retries=settings.retries)
    labels = [f"{what}, process {part + 1} of {parts}" for part in range(parts)]
    futures = [
        configured.submit(label, module, plan, part, parts, devices, places, on_line)
        for part, label in enumerate(labels)
    ]
    errors = []
    for label, future in zip(labels, futures, strict=True):
        future.wait()
        get_run_logger().info("%s: %s", label, future.state.name)
        if not future.state.is_completed():
            errors.append(error_of(future))
    return errors
