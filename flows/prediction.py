"""The prediction flow: partitions the records, tunes an adapter for every shard, and scores the protocols.

Shards and the scores of held-out records are made by processes of their own, as many at a time as cells are.

python -m flows.prediction        # what the DVC stage runs
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task, unmapped

from dptune.core.errors import ConfigError
from dptune.core.files import private_directory, write_json
from dptune.prediction.booking import write_booking
from dptune.prediction.ensemble import is_tuned
from flows.common.child import child
from flows.common.command import begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.runners import available_devices, error_of, free_place, run_process, with_threads
from flows.experiment import tags_of
from flows.server import flow
from tasks.experiment.checks import check_inputs, check_models
from tasks.mlflow import tracking
from tasks.paths import ENSEMBLES, PREDICTION, SPENT
from tasks.prediction.answers import publish_answers, score
from tasks.prediction.ensembles import (
    PLAN,
    EnsemblePlan,
    close_plan,
    open_plan,
    plans,
    scored_protocols,
    served_protocol,
)
from tasks.prediction.scores import SCORING, ScoringPlan, open_scoring, scoring_plan
from tasks.report.page import write_index
from tasks.report.prediction import write_page
from tasks.settings.params import Settings, load_settings
from tasks.split_records import records_digest
from tasks.stage import keep_pages, run_stage


@task(name="tune", task_run_name="{plan.models} models, shard {shard}", retries=1)
def tune_one(plan: EnsemblePlan, shard: int, devices: list[str], places: int) -> int:
    """Tune one shard's adapter in its own process, unless it is finished. Returns: the shard's number."""
    if not is_tuned(plan.directory, shard):
        with free_place(devices, places) as device:
            arguments = [str(plan.directory / PLAN), str(shard), "--device", device]
            _run(f"shard {shard}", child("tasks.prediction.ensembles", *arguments), len(devices) * places)
    return shard


@task(name="score records", task_run_name="{plan.ensemble.models} models, records {part} of {parts}", retries=1)
def score_records(plan: ScoringPlan, part: int, parts: int, devices: list[str], places: int) -> None:
    """Score a part of the held-out records on one ensemble, in a process of its own."""
    with free_place(devices, places) as device:
        arguments = [str(plan.directory / SCORING), str(part), str(parts), "--device", device]
        label = f"scores of {plan.ensemble.models} models"
        _run(label, child("tasks.prediction.scores", *arguments), len(devices) * places)


def _run(label: str, command: list[str], side_by_side: int) -> None:
    run_process(label, command, environment=with_threads(os.environ, side_by_side))


@task(name="score")
def score_all(settings: Settings, plans_to_score: list[EnsemblePlan], serving: Path, device: str) -> dict[str, Any]:
    """Score every protocol, the public model and the experiment's cells on held-out records."""
    return score(settings, plans_to_score, serving, device)


@flow(name="prediction", log_prints=True)
def prediction(params: str = "params.yaml", overrides: dict[str, Any] | None = None) -> str:
    """Tune the ensembles, score the protocols, and return the folder of the ensemble that answers prompts.

    Raises: ConfigError if there is nothing to predict; FlowError naming the shards that failed, after all others.
    """
    begin_flow()
    settings, logger = load_settings(Path(params), overrides), get_run_logger()
    if (reason := reason_to_skip(settings)) is not None:
        raise ConfigError("prediction", reason, fix="give numbers of models, and a task that predicts tokens")
    delta, chosen = settings.experiment.delta, plans(settings)
    protocol = served_protocol(settings.prediction.serve, settings.prediction, delta)
    for plan in chosen:
        scored_protocols(settings.prediction, plan.models, delta)  # raises for bad options before anything is tuned
    devices, records = available_devices(settings.experiment), records_digest()
    private_directory(ENSEMBLES)
    places = settings.experiment.cells_per_device
    for plan in chosen:
        open_plan(plan)
        write_booking(plan.directory, records, SPENT)
        futures = tune_one.map(unmapped(plan), list(range(plan.models)), unmapped(devices), unmapped(places))
        _wait_for({f"shard {shard} of {plan.directory.name}": future for shard, future in enumerate(futures)})
        serves = protocol if plan.models == protocol.models else None
        close_plan(plan, serves, settings.experiment.telemetry)
    if settings.experiment.telemetry == "research":
        _score_in_processes([scoring_plan(plan, settings) for plan in chosen], devices, places)
    serving = next(plan.directory for plan in chosen if plan.models == protocol.models)
    result = score_all(settings, chosen, serving, devices[0])
    timed = tracking.timed(settings.experiment.telemetry)
    parent = tracking.parent_run(settings.experiment.name, {}, timed=timed)
    publish_answers(result, parent, serving, tags_of(settings.experiment))
    write_page(result, PREDICTION)
    write_index()
    keep_pages(PREDICTION, settings.experiment.name)
    tracking.send(parent, PREDICTION, "prediction", timed=timed)
    logger.info("dptune generate answers from %s", serving)
    return str(serving)


def _score_in_processes(chosen: list[ScoringPlan], devices: list[str], places: int) -> None:
    """Score the held-out records on every ensemble; each place has a part of them.

    Raises: FlowError naming the ensembles of which a part failed, after all others.
    """
    for plan in chosen:
        open_scoring(plan)
    parts = min(len(devices) * places, chosen[0].prediction.records)
    _wait_for(
        {
            f"scores of {plan.ensemble.models} models, part {part + 1} of {parts}": score_records.submit(
                plan, part, parts, devices, places
            )
            for plan in chosen
            for part in range(parts)
        }
    )


def _wait_for(futures: dict[str, Any]) -> None:
    """Log the end of each. Raises: FlowError naming those that failed, after all others."""
    errors: dict[str, BaseException] = {}
    for number, (name, future) in enumerate(futures.items(), start=1):
        future.wait()
        get_run_logger().info("%d of %d, %s: %s", number, len(futures), name, future.state.name)
        if not future.state.is_completed():
            errors[name] = error_of(future)
    if errors:
        raise flow_error(f"{'; '.join(errors)}: failed", list(errors.values()))


def reason_to_skip(settings: Settings) -> str | None:
    """Why there is nothing to predict; None where there is."""
    if settings.task.classifies:
        return "task.kind is classify, and the protocols answer with next tokens"
    return None if settings.prediction.models else "prediction.models is empty"


def skip(reason: str) -> None:
    """Leave a note in place of the results."""
    logging.getLogger(__name__).info("no private prediction: %s", reason)
    write_json(private_directory(PREDICTION) / "skipped.json", {"reason": reason})


def main() -> None:
    """Run the flow on params.yaml, which is read before Prefect starts a server."""
    settings = load_settings()
    if (reason := reason_to_skip(settings)) is not None:
        skip(reason)
        return
    check_inputs()
    check_models(settings)
    named = prediction.with_options(flow_run_name=lambda: f"answers of {settings.experiment.name}")
    run_flow(lambda: run_deployed(named, settings))


if __name__ == "__main__":
    run_stage(main)
