"""The policy flow: makes all runs of private reinforcement learning, each in its own process, and writes a page.

python -m flows.policy        # `make policy`
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from prefect import get_run_logger, task
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from dptune.core.errors import ConfigError
from dptune.core.files import private_directory, read_json, write_json, write_text
from dptune.privacy.run_folder import RunFolder
from flows.common.child import child
from flows.common.command import begin_flow, flow_error, run_flow
from flows.common.deployed_run import run_deployed
from flows.common.runners import error_of, free_place, run_process
from flows.server import flow
from tasks.experiment.cells import PUBLISHED
from tasks.mlflow import tracking
from tasks.paths import POLICY, PUBLIC_MODEL, PUBLIC_VALIDATION, SPLITS
from tasks.policy.audit import audits
from tasks.policy.gradient import PolicyCell, check_environments, policy_cells
from tasks.policy.rlhf import cells
from tasks.policy.tenants import TENANTS
from tasks.profile import read_profile
from tasks.report.page import write_index
from tasks.report.policy import write_page
from tasks.settings.params import Settings, load_settings
from tasks.settings.policy import PolicySettings
from tasks.settings.strict import as_json
from tasks.stage import run_command

_DEVICE = "cpu"  # the networks have a few thousand parameters, too few for a GPU


@task(name="policy run", task_run_name="{cell.name}", retries=1)
def run_one(cell: PolicyCell, processes: int) -> dict[str, Any]:
    """Make one run, or resume it from its ledger; a finished run is only read. Returns: its result."""
    folder = RunFolder(cell.directory)
    if not folder.result.exists():
        private_directory(cell.directory)
        write_text(folder.policy_cell, cell.model_dump_json(indent=2))
        with free_place([_DEVICE], processes):
            run_process(cell.name, child("tasks.policy.gradient", str(folder.policy_cell)))
    return read_json(folder.result)


@task(name="public inputs")
def public_inputs(processes: int, own_model: bool = True) -> None:
    """Make the split and what is public by their DVC stages, if they are missing.

    Policies train on the pipeline's own model whether or not the experiment does, for which DVC would skip it.

    Args:
        own_model: whether any of them trains on that model; otherwise the experiment's public records are made.
    """
    if not own_model:
        if not (PUBLIC_VALIDATION.exists() and SPLITS.is_dir()):
            with free_place([_DEVICE], processes):
                run_process("public inputs", child("dvc", "repro", "split", "validation"))
    elif not (PUBLIC_MODEL.is_dir() and SPLITS.is_dir()):
        with free_place([_DEVICE], processes):
            run_process("public inputs", child("dvc", "repro", "split", "pretrain"))
            if not PUBLIC_MODEL.is_dir():
                run_process("public model", child("tasks.corpus.pretrain", "--always"))


@task(name="part", task_run_name="{name}", retries=1)
def run_part(name: str, module: str, settings: dict[str, Any], inputs: Any, processes: int) -> None:
    """Run a part in its own process, after ``inputs`` are ready. The part reads its results if it is finished."""
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with free_place([_DEVICE], processes):
        run_process(name, child(module, *options))


@flow(name="policy", log_prints=True)
def policy(params: str = "params.yaml", overrides: dict[str, Any] | None = None) -> str:
    """Run every study, attack the release, and write data/policy/policy.html.

    Raises: FlowError naming the runs that failed, after all others.
    """
    begin_flow()
    settings = policy_of(load_settings(Path(params), overrides))
    check_environments(settings)
    chosen = policy_cells(settings)
    private_directory(POLICY)
    tags = {"git_commit": tracking.git_commit(), "data": "simulated users"}
    parent = tracking.parent_run(settings.name, tags, timed=False)  # some of its runs have private telemetry
    others = parts(settings)
    # Submitted first, because it takes longest and parts wait for it.
    own_model = bool(settings.tenants) or settings.rlhf is None or settings.rlhf.model is None
    inputs = public_inputs.submit(settings.processes, own_model) if others else None
    futures: dict[str, PrefectFuture[Any]] = {cell.name: run_one.submit(cell, settings.processes) for cell in chosen}
    for name, module, section in others:
        futures[name] = run_part.submit(name, module, section, inputs, settings.processes)
    attacks = audits(settings)  # while the runs are under way
    failed = failures(futures)
    results = [futures[cell.name].result() for cell in chosen if cell.name not in failed]
    for result in results:
        publish(result, parent)
    if failed:
        tracking.finish_parent(parent, failed=True, timed=False)
        errors = [error_of(futures[name]) for name in failed]
        raise flow_error(f"{len(failed)} of {len(futures)} runs failed: {', '.join(failed)}", errors)
    extra = {"audits": attacks, **other_results(settings)}
    publish_others(settings, extra, parent)
    write_json(RunFolder(POLICY).results, {"runs": results, **extra})
    write_page(results, settings.delta, extra, POLICY)
    write_index()
    tracking.send(parent, POLICY / "policy.html", timed=False)
    tracking.finish_parent(parent, failed=False, timed=False)
    return str(POLICY / "policy.html")


def policy_of(settings: Settings) -> PolicySettings:
    """The policy section, with the experiment's telemetry for language models, which train on its records.

    Raises: ConfigError if the section asks for what private telemetry forbids.
    """
    chosen = settings.policy
    if chosen.rlhf is None:
        return chosen
    try:
        rlhf = replace(chosen.rlhf, telemetry=settings.experiment.telemetry)
    except ConfigError as error:
        raise ConfigError(f"policy.rlhf.{error.field}", error.problem, fix=error.fix) from None
    return chosen.model_copy(update={"rlhf": rlhf})


def failures(futures: dict[str, PrefectFuture[Any]]) -> list[str]:
    """Wait for all runs. Returns: the names of those that failed."""
    failed = []
    for number, (name, future) in enumerate(futures.items(), start=1):
        future.wait()
        get_run_logger().info("%d of %d: %s %s", number, len(futures), name, str(future.state.name).lower())
        if not future.state.is_completed():
            failed.append(name)
    return failed


def parts(settings: PolicySettings) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, module, settings) of each part that needs no environment: every language model, and tenants."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    if settings.tenants:  # submitted first, because it takes longest
        found.append(("tenants", "tasks.policy.tenants", as_json(settings.tenants)))
    if settings.rlhf:
        shared = as_json(settings.rlhf)
        for cell in cells(settings.rlhf):
            one = {"users": [cell.users], "seeds": [cell.seed], "nonprivate": cell.epsilon is None}
            budgets = [] if cell.epsilon is None else [cell.epsilon]
            found.append((f"rlhf.{cell.label}", "tasks.policy.rlhf", shared | one | {"epsilons": budgets}))
    return found


def other_results(settings: PolicySettings) -> dict[str, Any]:
    """The results that the other parts (``parts``) wrote, by name."""
    found: dict[str, Any] = {}
    if settings.rlhf:
        found["rlhf"] = [read_json(RunFolder(cell.directory).results) for cell in cells(settings.rlhf)]
    if settings.tenants:
        found["tenants"] = read_json(RunFolder(TENANTS).results)
    return found


def publish(result: dict[str, Any], parent: str) -> None:
    """Send the result of a run on an environment to MLflow. All of it is public."""
    directory = PolicyCell.model_validate({key: result[key] for key in PolicyCell.model_fields}).directory
    params = {"environment": result["environment"], "kind": result["kind"], **result["training"]}
    tags = {"study": result["study"], "label": result["label"], "data": "simulated users"}
    curve = {point["update"]: {name: point[name] for name in ("mean_return", "users")} for point in result["points"]}
    ends = _prices(result) | {"final_return": result["final_return"]}
    _publish(parent, result["name"], directory, params | (result["method"] or {}), tags, curve, ends)


def publish_others(settings: PolicySettings, results: dict[str, Any], parent: str) -> None:
    """Send the public results of language models and tenants to MLflow."""
    for cell, result in zip(cells(settings.rlhf) if settings.rlhf else [], results.get("rlhf", []), strict=True):
        tags = {"study": "rlhf", "label": cell.label, "data": result["data"]}
        points = result["curve"]
        curve = {point["updates"]: {name: point[name] for name in ("reward", "score", "kl")} for point in points}
        params = as_json(cell.settings) | {"users": cell.users, "epsilon": cell.epsilon}
        _publish(parent, f"rlhf.{cell.label}", cell.directory, params, tags, curve, _prices(result))
    if tenants := results.get("tenants"):
        # MLflow refuses "+" in names of metrics.
        names = {line["label"]: f"public_perplexity.{line['label'].replace('+', '_')}" for line in tenants["summary"]}
        ends = {names[line["label"]]: line["public_perplexity"] for line in tenants["summary"]}
        tags = {"study": "tenants", "data": tenants["data"]}
        _publish(parent, "tenants", TENANTS, tenants["settings"], tags, {}, ends | _prices(tenants))


def _prices(result: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in result.items() if key.startswith("epsilon_")}


def _publish(
    parent: str,
    name: str,
    directory: Path,
    params: dict[str, Any],
    tags: dict[str, str],
    curve: dict[int, dict[str, float]],
    ends: dict[str, float],
) -> None:
    """Send a run to MLflow, once: its curve, its final figures, and its ledger."""
    if parent == tracking.LATER or (directory / PUBLISHED).exists():
        return
    child = tracking.ChildRun(parent, name, RunFolder(directory).mlflow_run, params, tags, timed=False, kept=False)
    for step, metrics in curve.items():
        child.log(step, metrics)
    child.log(max(curve, default=0), ends)
    if (ledger := RunFolder(directory).ledger).exists():
        child.artifact(ledger)
    if child.end():
        write_text(directory / PUBLISHED, child.run_id)


def main(profile: Annotated[Path | None, typer.Option(help="parameters to lay over params.yaml")] = None) -> None:
    """Run the flow on params.yaml, which is read before Prefect starts a server."""
    over = read_profile(profile) if profile else {}
    whole = load_settings(overrides=over)
    # The stages would make other records, and the flow would train on them.
    if "data" in over and whole.data != load_settings().data:
        problem = f"{profile} has other records than params.yaml, from which DVC makes data/splits"
        fix = f"run `dvc exp run $(python -m tasks.profile {profile}) split validation`, which writes them there, first"
        raise ConfigError("data", problem, fix=fix)
    settings = policy_of(whole)
    check_environments(settings)
    # There are as many workers as slots: a worker that waits for a slot looks for one every few seconds only.
    workers: Any = ThreadPoolTaskRunner(max_workers=settings.processes)
    named = policy.with_options(task_runner=workers, flow_run_name=lambda: f"policy: {settings.name}")
    run_flow(lambda: print(run_deployed(named, whole, overrides=over)))


if __name__ == "__main__":
    run_command(main)
