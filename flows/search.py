"""The search flow: makes the data, searches in a process of its own, and tells of the winner alone.

python -m flows.search        # `make search`

No stage of DVC: its lock would tell how many candidates there were. So would the number of tasks, of retries and of log
lines, which are the same for every search. A rehearsal has no such secret.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.common.child import child
from flows.common.command import CellError, FlowError, begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.pages import progress_page, search_name, show_file
from flows.common.runners import (
    THREADS,
    SharedFolder,
    available_devices,
    environment_with,
    error_of,
    free_place,
    open_runner,
    own_threads,
    run_process,
    shared_folder,
)
from flows.experiment import check_overrides, make_data
from flows.server import flow
from tasks.experiment.checks import check_models
from tasks.paths import REPORT
from tasks.profile import read_profile
from tasks.report.page import write_index
from tasks.report.search import PAGE, failure_of, unranked, write_page
from tasks.search.publish import publish
from tasks.search.request import check_search, digest_of, folder_of, refuse_paid, remember_shown, shown
from tasks.settings.experiment import Experiment
from tasks.settings.params import Settings, load_settings
from tasks.settings.search import Search
from tasks.stage import USER_ERROR, run_command

#: The stages that make what a search reads; it reads no canaries.
DATA_STAGES = ("split", "validation", "pretrain")


@task(name="search", task_run_name="search", cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_search(settings: Experiment, options: list[str], place: SharedFolder, threads: dict[str, str | None]) -> None:
    """Search in a process of its own, on the first free device of the machine that this runs on.

    One that was stopped goes on, also that of a worker that was killed.

    Args:
        options: what the process is told beside its device.
        place: the flow's working directory, which every machine must see.
        threads: the flow's environment variables for numbers of threads; a cluster sets others.

    Raises: CellError with the cause.
    """
    os.umask(0o077)  # a worker's umask is that of the shell that started it
    place.check()
    with free_place(available_devices(settings), settings.cells_per_device) as device:
        command = child("tasks.search.run", "--device", device, *options)
        run_process("search", command, place.path, environment_with(threads))


def search_where_asked(settings: Settings, params: str, overrides: dict[str, Any]) -> None:
    """Run the search where ``experiment.runner`` says: here, or as the one task of a cluster.

    It is one task whatever its candidates do, and so tells a cluster as little as it tells Prefect.

    Raises: FlowError with the cause.
    """
    here = settings.experiment.runner == THREADS
    options = ["--params", params, "--overrides", json.dumps(overrides), "--expect", digest_of(settings)]
    with shared_folder(settings.experiment.runner) as place:
        try:
            if here:
                run_search(settings.experiment, options, place, own_threads())
                return
            options.append("--wait")  # the process of a killed worker ends a moment later
            given = {"settings": settings.experiment, "options": options, "place": place, "threads": own_threads()}
            with open_runner(settings.experiment, 1) as runner:
                future = runner.submit(run_search, given)
                future.wait()
                error = None if future.state.is_completed() else error_of(future)
        except CellError as ended:
            error = ended
    if error is not None:
        raise flow_error("the search has not ended", [error]) from error


@task(name="page", task_run_name="page", cache_policy=NO_CACHE)
def write_search_page(settings: Settings) -> str:
    """Write the page on a search that ended as asked, and send it and the winner to MLflow. Returns the page's answer.

    What was sent whole is remembered, so that the next command only shows it.
    """
    folder = folder_of(settings)
    answer = write_page(folder, REPORT)
    write_index()
    if publish(folder, REPORT / PAGE, answer) and failure_of(folder) is None:
        remember_shown(settings, REPORT / PAGE, answer)
    return answer


@flow(name="search", log_prints=True)
def search(params: str = "params.yaml", overrides: dict[str, Any] | None = None) -> str:
    """Make the data, search, and write data/report/search.html. Returns its path.

    Args:
        params: the parameter file; it is not written.
        overrides: sections to merge over the parameter file, such as ``{"search": {"epsilon": 4}}``.

    Raises: ConfigError for settings that are refused, before any work; FlowError naming what failed. Where nothing was
        released, or the check of a ranking stopped, the page is written before.
    """
    begin_flow()
    settings = load_settings(Path(params), overrides)
    _check(settings, overrides or {})
    show = progress_page("search")
    show(0, "data")
    make_data(lambda stage: None, DATA_STAGES)
    refuse_paid(settings)
    show(0.2, _under_way(settings.search))
    try:
        search_where_asked(settings, params, overrides or {})
    except FlowError:
        # The winner is out, and the check of its ranking has not ended. Its page is neither sent nor remembered: these
        # settings may have been refused, or another command be at work on the check.
        if unranked(folder_of(settings)):
            write_page(folder_of(settings), REPORT)
            write_index()
        raise
    show(0.9, "page")
    answer, page = write_search_page(settings), REPORT / PAGE
    show_file("the search", page, answer)
    show(1, "done")
    get_run_logger().info("%s The page is %s", answer, page.resolve())
    if (why := failure_of(folder_of(settings))) is not None:
        fix = "lower the learning rates of the space; another search adds its cost"
        problem = f"{why}, so the base model is the result; the page is {page}. Fix: {fix}."
        raise FlowError("nothing was released, and the budget is spent", problem, USER_ERROR)
    return str(page)


def _under_way(section: Search) -> str:
    """What the page says while the search runs: of a rehearsal, which is public, more than of a private search."""
    if not section.rehearses:
        return "searching; the number of candidates is secret, so no progress is shown"
    rehearsed = f"rehearsing {section.asked.rehearsals} settings on public records, then one run on the private ones"
    return rehearsed + (", and then one for each other setting" if section.check_ranking else "")


def _check(settings: Settings, overrides: dict[str, Any]) -> None:
    """Raise ConfigError for settings that a search refuses, before any work."""
    check_overrides(overrides)
    check_models(settings)
    check_search(settings)


def main(profile: Annotated[Path | None, typer.Option(help="parameters to lay over params.yaml")] = None) -> None:
    """Run the flow on params.yaml, which is read before Prefect starts a server."""
    over = read_profile(profile) if profile else {}
    settings = load_settings(overrides=over)
    if answer := shown(settings, REPORT / PAGE):
        print(f"{answer} Nothing changed since. The page is {(REPORT / PAGE).resolve()}")
        return
    _check(settings, over)
    named = search.with_options(flow_run_name=lambda: search_name(settings.search))
    run_flow(lambda: print(run_deployed(named, settings, overrides=over)))


if __name__ == "__main__":
    run_command(main)
