"""The policy flow: every run of private reinforcement learning as a Prefect task in a process of its own, and a page.

python -m flows.policy        # `make policy`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.concurrency.sync import concurrency

from dptune.files import private_directory, write_json, write_text
from flows.experiment import limit_name, run_process, set_limit
from tasks import tracking
from tasks.paths import POLICY
from tasks.policy import JOB, LEDGER, RESULT, Job, jobs
from tasks.policy_audit import audits
from tasks.policy_report import write_page
from tasks.settings import load_settings
from tasks.stage import run_stage

_MARKER = "mlflow_run"
_DEVICE = "cpu"  # networks of a few thousand parameters


@task(name="policy run", task_run_name="{job.name}", retries=1)
def run_one(job: Job) -> dict[str, Any]:
    """Train one policy; a finished one is kept, and one that died resumes from its ledger."""
    if not (job.directory / RESULT).exists():
        private_directory(job.directory)
        write_text(job.directory / JOB, job.model_dump_json(indent=2))
        with concurrency(limit_name(_DEVICE), occupy=1, strict=True):
            run_process(job.name, [sys.executable, "-m", "tasks.policy", str(job.directory / JOB)])
    result: dict[str, Any] = json.loads((job.directory / RESULT).read_text(encoding="utf-8"))
    return result


@flow(name="policy", log_prints=True)
def policy(params: str = "params.yaml", overrides: dict[str, Any] | None = None) -> str:
    """Run every study, attack the release, and write data/policy/policy.html.

    Raises: RuntimeError naming the runs that failed, after all others.
    """
    settings, logger = load_settings(Path(params), overrides).policy, get_run_logger()
    chosen = jobs(settings)
    private_directory(POLICY)
    set_limit(_DEVICE, settings.processes)
    parent = tracking.parent_run(settings.name, {"git_commit": tracking.git_commit(), "data": "simulated users"})
    futures = [run_one.submit(job) for job in chosen]
    results, failed = [], []
    for number, (job, future) in enumerate(zip(chosen, futures, strict=True), start=1):
        future.wait()
        logger.info("%d of %d runs: %s %s", number, len(chosen), job.name, str(future.state.name).lower())
        if future.state.is_completed():
            results.append(future.result())
            if not (job.directory / _MARKER).exists():
                publish(job, results[-1], parent)
        else:
            failed.append(job.name)
    if failed:
        tracking.finish_parent(parent, failed=True)
        raise RuntimeError(f"{len(failed)} of {len(chosen)} runs failed: {', '.join(failed)}")
    extra = {"audits": audits(settings)}
    write_json(POLICY / "results.json", {"runs": results, **extra})
    write_page(results, extra, POLICY)
    tracking.client().log_artifact(parent, str(POLICY / "policy.html"))
    tracking.finish_parent(parent, failed=False)
    return str(POLICY / "policy.html")


def publish(job: Job, result: dict[str, Any], parent: str) -> None:
    """A run in MLflow: the curve, the three epsilons and the ledger. All of it public."""
    params = {"environment": job.environment, "kind": job.kind, **job.training, **(job.method or {})}
    tags = {"study": job.study, "label": job.label, "data": "simulated users"}
    child = tracking.ChildRun(parent, job.name, job.directory / _MARKER, params, tags)
    for point in result["points"]:
        child.log(point["update"], {"mean_return": point["mean_return"], "users": point["users"]})
    prices = {key: float(value) for key, value in result.items() if key.startswith("epsilon_")}
    child.log(0, prices | {"final_return": result["final_return"]})
    if (job.directory / LEDGER).exists():
        child.artifact(job.directory / LEDGER)
    child.end()


def main() -> None:
    """Run the flow on params.yaml; failed runs end it with a message and status 1."""
    try:
        print(policy())
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_stage(main)
