"""The deployments that `make ui` serves: flows whose parameters are a form with the values of params.yaml.

Each flow here is the one of its module, with one field for each setting that is often changed. A run that is refused or
fails says in its state what is wrong and what to do.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from inspect import getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from prefect import Flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.deployments.runner import RunnerDeployment
from prefect.runner import Runner
from prefect.states import Failed
from prefect.types.entrypoint import EntrypointType

from dptune.core.declarations import Count, CountOrZero, Delta, Epochs, Epsilon, FewOrZero, Rows, Seed
from dptune.core.errors import DptuneError
from dptune.job.settings import Telemetry
from flows.audit import audit
from flows.common.command import SERVING, FlowError, end_quietly, end_when_cancelled
from flows.common.form import (
    GRIDS,
    Label,
    LoraEntries,
    ModelName,
    Training,
    audit_folder_of,
    changes,
    file_values,
    folder_of,
    records_words,
)
from flows.common.pages import (
    audit_form_name,
    grid_form_name,
    policy_form_name,
    prediction_form_name,
    search_form_name,
    show_file,
    show_results,
)
from flows.experiment import experiment
from flows.policy import policy
from flows.prediction import prediction
from flows.search import search
from flows.server import flow
from flows.study import study, wait_for_approval
from tasks.paths import POLICY, PREDICTION
from tasks.settings.params import load_settings
from tasks.settings.search import Candidates, Score, Shape
from tasks.stage import last_error

PARAMS = Path("params.yaml")
_SECONDS = 2.0
Labels = Annotated[list[Label], MinLen(1)]
Seeds = Annotated[list[Seed], MinLen(1)]
Sections = dict[str, Any]
Accounting = Literal["certified", "noise_only", "published"]


@flow(name="study", flow_run_name=grid_form_name, log_prints=True)
def study_form(
    name: str,
    mechanisms: Labels,
    epsilons: list[Epsilon],
    delta: Delta,
    seeds: Seeds,
    epochs: Epochs,
    accounting: Accounting,
    telemetry: Telemetry,
    overrides: Sections,
    ask_first: bool = False,
    models: list[ModelName] = [],  # noqa: B006
    training: Training = {},  # noqa: B006
    lora: LoraEntries = {},  # noqa: B006
) -> Any:
    """Data, public model, experiment, audit and report in one run.

    What is done already is not done again: stages that nothing changed, finished cells, finished audits.

    Args:
        name: name of the experiment in MLflow and on the report; another name trains, and pays, anew.
        mechanisms: labels of entries under `mechanisms` in params.yaml.
        epsilons: privacy budgets; each makes one cell for every model, mechanism and seed. An entry of params.yaml
            with `epsilons` of its own keeps those, and the run's log says so.
        delta: delta of every epsilon; far below one in the number of people.
        seeds: seeds of the adapters' initialisation.
        epochs: passes over the records.
        accounting: epsilon that the noise is calibrated to; only a certified one is a guarantee.
        telemetry: research logs curves of private records; private publishes only what the ledger released.
        overrides: other sections to merge over params.yaml, such as {"audit": {"shadows": 4}}.
        ask_first: wait before the first release until somebody has read the price and resumes the run.
        models: names of base models under `experiment.models` in params.yaml; none: all of them.
        training: schedule and update rule of every cell.
        lora: adapters of every cell.
    """
    given = changes("study", locals())
    return _outcome(lambda: study.fn(overrides=given, ask_first=ask_first))


@flow(name="experiment", flow_run_name=grid_form_name, log_prints=True)
def experiment_form(
    name: str,
    mechanisms: Labels,
    epsilons: list[Epsilon],
    delta: Delta,
    seeds: Seeds,
    epochs: Epochs,
    runner: str,
    accounting: Accounting,
    telemetry: Telemetry,
    overrides: Sections,
    ask_first: bool = False,
    models: list[ModelName] = [],  # noqa: B006
    training: Training = {},  # noqa: B006
    lora: LoraEntries = {},  # noqa: B006
) -> Any:
    """The cells alone: models x mechanisms x epsilons x seeds. Finished cells are kept.

    Args:
        name: name of the experiment in MLflow and on the report; another name trains, and pays, anew.
        mechanisms: labels of entries under `mechanisms` in params.yaml.
        epsilons: privacy budgets; each makes one cell for every model, mechanism and seed. An entry of params.yaml
            with `epsilons` of its own keeps those, and the run's log says so.
        delta: delta of every epsilon; far below one in the number of people.
        seeds: seeds of the adapters' initialisation.
        epochs: passes over the records.
        runner: threads, dask, ray, or the address of a running cluster.
        accounting: epsilon that the noise is calibrated to; only a certified one is a guarantee.
        telemetry: research logs curves of private records; private publishes only what the ledger released.
        overrides: other sections to merge over params.yaml, such as {"audit": {"shadows": 4}}.
        ask_first: wait before the first release until somebody has read the price and resumes the run.
        models: names of base models under `experiment.models` in params.yaml; none: all of them.
        training: schedule and update rule of every cell.
        lora: adapters of every cell.
    """
    given = changes("experiment", locals())

    def work() -> Any:
        folder = folder_of(given)
        if ask_first:
            wait_for_approval(given)
        folders = experiment.fn(overrides=given, folder=folder)
        show_results(load_settings(PARAMS, given).experiment.name, folder)
        return folders

    return _outcome(work)


@flow(name="audit", flow_run_name=audit_form_name, log_prints=True)
def audit_form(
    generations: Rows,
    records: CountOrZero,
    shadows: FewOrZero,
    step_trials: CountOrZero,
    seed: Seed,
    overrides: Sections,
) -> Any:
    """The attacks on every cell of the last experiment; those that were made with these settings are kept.

    Args:
        generations: samples of the extraction attack.
        records: training records, and as many held-out ones, for the membership attacks.
        shadows: models that LiRA and RMIA train for themselves: 4 or more, or 0.
        step_trials: trials of the white-box audit of the private step, in each world: 500 or more, or 0.
        seed: seed of samples and of the choice of records.
        overrides: other sections to merge over params.yaml, such as {"audit": {"candidates": 63}}.
    """
    given = changes("audit", locals())

    def work() -> Any:
        folder = audit_folder_of(given)
        files = audit.fn(overrides=given, folder=folder)
        show_results(load_settings(PARAMS, given).experiment.name, folder)
        return files

    return _outcome(work)


@flow(name="prediction", flow_run_name=prediction_form_name, log_prints=True)
def prediction_form(
    models: list[Count],
    epsilons: list[Epsilon],
    tokens: list[Count],
    public_weights: list[float],
    records: Rows,
    overrides: Sections,
) -> Any:
    """Answers within a budget: ensembles on disjoint shards, and the protocols that answer from them.

    Args:
        models: slots of an ensemble; each number tunes one ensemble.
        epsilons: budgets to compare.
        tokens: how many answers a budget must last for.
        public_weights: least weights of the public model, of the provable variant.
        records: held-out records that protocols are scored on.
        overrides: other sections to merge over params.yaml, such as {"prediction": {"alpha": 4}}.
    """
    given = changes("prediction", locals())

    def work() -> Any:
        folder = prediction.fn(overrides=given)
        show_file("private prediction", PREDICTION / "prediction.html")
        return folder

    return _outcome(work)


@flow(name="search", flow_run_name=search_form_name, log_prints=True)
def search_form(
    name: str,
    epsilon: Epsilon,
    candidates: Candidates,
    shape: Shape,
    score: Score,
    again: bool,
    overrides: Sections,
    training: Training = {},  # noqa: B006
    lora: LoraEntries = {},  # noqa: B006
) -> Any:
    """The best of a random number of candidates, with one guarantee for the whole search; their number stays secret.

    A search of this name that was stopped goes on. One that has ended is shown again.

    Args:
        name: name of the search, of its folder and of its run in MLflow.
        epsilon: budget of the whole search.
        candidates: average number of candidates.
        shape: distribution of their number: 0 logarithmic, 1 geometric, inf Poisson.
        score: score by which candidates are compared: noisy, public or rehearsal, or a table.
        again: accept that these records were searched before; the costs add up.
        overrides: other sections to merge over params.yaml, such as {"search": {"space": {"epochs": [1, 2]}}}.
        training: schedule and update rule of every candidate.
        lora: adapters of every candidate.
    """
    given = changes("search", locals())
    return _outcome(lambda: search.fn(overrides=given))


@flow(name="policy", flow_run_name=policy_form_name, log_prints=True)
def policy_form(name: str, seeds: Seeds, audit_trials: CountOrZero, processes: Count, overrides: Sections) -> Any:
    """Private reinforcement learning: every study of params.yaml, and the attack on its releases.

    Args:
        name: name of the experiment in MLflow.
        seeds: seeds of environments and initial policies.
        audit_trials: trials of the white-box attack on the mean update: 500 or more, or 0.
        processes: runs side by side.
        overrides: other sections to merge over params.yaml, such as {"policy": {"rlhf": null}}.
    """
    given = changes("policy", locals())

    def work() -> Any:
        page = policy.fn(overrides=given)
        show_file("private reinforcement learning", POLICY / "policy.html")
        return page

    return _outcome(work)


def _outcome(work: Callable[[], Any]) -> Any:
    """The work's result; a failed state with cause and fix for what is refused or has failed."""
    end_when_cancelled()
    try:
        return work()
    except FlowError as error:
        return _failed(f"{error.summary}: {error.cause}")
    except (DptuneError, OSError) as error:
        return _failed(last_error(error))


def _failed(sentence: str) -> State[Any]:
    get_run_logger().error("%s", sentence)
    return Failed(message=sentence)


_FLOWS: dict[str, Flow[..., Any]] = {
    "study": study_form,
    "experiment": experiment_form,
    "audit": audit_form,
    "prediction": prediction_form,
    "search": search_form,
    "policy": policy_form,
}


def fields_of(deployment: str) -> tuple[str, ...]:
    """The fields of a deployment's form: the parameters of its flow."""
    return tuple(signature(_FLOWS[deployment].fn).parameters)


def deployments() -> list[RunnerDeployment]:
    """Every deployment, its form filled with the values of params.yaml."""
    settings = load_settings(PARAMS)
    made: list[Any] = [
        one.to_deployment(
            name,
            parameters=file_values(name, fields_of(name), settings),
            description=f"{getdoc(one.fn)}\n\n{records_words(settings)}" if name in GRIDS else None,
            tags=["dptune"],
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        for name, one in _FLOWS.items()
    ]
    for deployment in made:
        # A list that is given, even an empty one, replaces the schedules that the owner added, whenever the deployment
        # is registered: at each start, and after each change of params.yaml.
        deployment.model_fields_set.discard("schedules")
    return made


def serve_deployments() -> None:
    """Register the deployments, and run flows when the UI, a schedule or the API asks for them, until stopped."""
    os.environ[SERVING] = str(os.getpid())
    threading.Thread(target=_follow_file, daemon=True).start()
    # A schedule that was paused at the end would stay paused at the next start.
    runner = _Runner(pause_on_shutdown=False, limit=1)
    for deployment in deployments():
        runner.add_deployment(deployment)
    asyncio.run(runner.start())


class _Runner(Runner):
    """Prefect's runner, whose own end on SIGTERM is a traceback and waits for no run."""

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        """End the runs under way, and this process."""
        end_quietly()


def _follow_file() -> None:
    """Register the deployments again whenever params.yaml was changed, so that forms show its values."""
    before = _stamp()
    while True:
        time.sleep(_SECONDS)
        if (now := _stamp()) != before:
            before = now
            try:
                for deployment in deployments():
                    deployment.apply()
            except Exception as error:
                print(f"forms keep their values: {error}", flush=True)


def _stamp() -> int:
    return PARAMS.stat().st_mtime_ns if PARAMS.exists() else 0
