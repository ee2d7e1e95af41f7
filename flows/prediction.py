"""The prediction flow: partitions the records, tunes an adapter for every shard, and scores the protocols.

Shards and the scores of held-out records are made by processes of their own, as many at a time as cells are.

python -m flows.prediction        # what the DVC stage runs
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import private_directory, write_json
from dptune.prediction.booking import write_booking
from dptune.prediction.ensemble import is_tuned
from flows.common.command import begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.processes import WAIT, run_parts
from flows.common.runners import available_devices
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
from tasks.prediction.scores import ScoringPlan, open_scoring, scoring_plan
from tasks.report.page import publish
from tasks.report.prediction import write_page
from tasks.settings.experiment import Experiment
from tasks.settings.params import Settings, load_settings
from tasks.split_records import records_digest
from tasks.stage import run_stage


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
    records = records_digest()
    private_directory(ENSEMBLES)
    for plan in chosen:
        open_plan(plan)
        write_booking(plan.directory, records, SPENT)
        _tune(plan, settings.experiment)
        serves = protocol if plan.models == protocol.models else None
        close_plan(plan, serves, settings.experiment.telemetry)
    if settings.experiment.telemetry == "research":
        for plan in chosen:
            _score_records(scoring_plan(plan, settings), settings.experiment)
    serving = next(plan.directory for plan in chosen if plan.models == protocol.models)
    result = score_all(settings, chosen, serving, available_devices(settings.experiment)[0])
    timed = tracking.timed(settings.experiment.telemetry)
    parent = tracking.parent_run(settings.experiment.name, {}, timed=timed)
    publish_answers(result, parent, serving, tags_of(settings.experiment))
    write_page(result, PREDICTION)
    publish(PREDICTION, settings.experiment.name)
    tracking.send(parent, PREDICTION, "prediction", timed=timed)
    logger.info("dptune generate answers from %s", serving)
    return str(serving)


def _tune(plan: EnsemblePlan, settings: Experiment) -> None:
    """Tune the shards that are not tuned. Raises: FlowError naming those that are not tuned then."""

    def left() -> list[int]:
        return [shard for shard in range(plan.models) if not is_tuned(plan.directory, shard)]

    file, module = plan.directory / PLAN, "tasks.prediction.ensembles"
    errors = run_parts(f"{plan.models} models", module, file, len(left()), settings)
    if failed := left():
        summary = f"{', '.join(f'shard {shard}' for shard in failed)} of {plan.directory.name}: not tuned"
        raise flow_error(
            summary, errors or [DptuneError(f"{plan.directory}: another process tunes there. Fix: {WAIT}.")]
        )


def _score_records(plan: ScoringPlan, settings: Experiment) -> None:
    """Score the held-out records that have no score. Raises: FlowError, after all processes have ended."""
    file, what = open_scoring(plan), f"scores of {plan.ensemble.models} models"
    left = sum(not plan.file(number).exists() for number in range(plan.prediction.records))
    if errors := run_parts(what, "tasks.prediction.scores", file, left, settings):
        raise flow_error(f"{what}: some failed", errors)


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
