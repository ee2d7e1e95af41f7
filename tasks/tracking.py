"""MLflow: one parent run per experiment, one child per cell. Nothing but what it is handed reaches it.

A run whose times must not be told is stamped with ``NO_TIME`` wherever MLflow stamps: its start, its end, its metrics,
and its files in a local store. How long a run takes follows the number of its micro-batches, hence the secret size of
each batch.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from tasks.paths import DATA

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Alembic's start-up chatter says nothing to a user.
logging.getLogger("alembic").setLevel(logging.WARNING)

from mlflow import MlflowClient  # noqa: E402 (the environment decides what its import does)
from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.utils.file_utils import local_file_uri_to_path  # noqa: E402

#: Milliseconds since 1970 that stand for every time of a run that tells none; MLflow takes 0 for "now".
NO_TIME = 1
_PARENT_TAG = "dptune.parent"
_BATCH = 500


def database_uri(file: Path) -> str:
    """The address of a SQLite file: a ``%`` or ``?`` of its path is escaped, or another file would be opened."""
    return f"sqlite:///{quote(str(file))}"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in data/."""
    return os.environ.get("MLFLOW_TRACKING_URI") or database_uri((DATA / "mlflow.db").resolve())


def client() -> MlflowClient:
    """A client of the tracking server in use."""
    return MlflowClient(tracking_uri=tracking_uri())


def timed(telemetry: str) -> bool:
    """Whether the times of a run may be told."""
    return telemetry == "research"


def parent_run(experiment: str, tags: dict[str, str], *, timed: bool = True) -> str:
    """The run id of the experiment's parent run: found by its name, or started.

    Args:
        timed: stamp a new one with the time.
    """
    mlflow = client()
    experiment_id = _experiment_id(mlflow, experiment)
    found = mlflow.search_runs([experiment_id], f"tags.`{_PARENT_TAG}` = 'true'", max_results=1)
    if found:
        run_id = str(found[0].info.run_id)
    else:
        run_id = _created(mlflow, experiment_id, {_PARENT_TAG: "true"}, experiment, timed)
    for key, value in tags.items():
        mlflow.set_tag(run_id, key, value)
    return run_id


def finish_parent(run_id: str, failed: bool, *, timed: bool = True) -> None:
    """Mark the parent run as ended."""
    _terminate(client(), run_id, "FAILED" if failed else "FINISHED", timed)


def _created(mlflow: MlflowClient, experiment_id: str, tags: dict[str, str], name: str, timed: bool) -> str:
    run = mlflow.create_run(experiment_id, start_time=None if timed else NO_TIME, tags=tags, run_name=name)
    return str(run.info.run_id)


def _terminate(mlflow: MlflowClient, run_id: str, status: str, timed: bool) -> None:
    mlflow.set_terminated(run_id, status, end_time=None if timed else NO_TIME)


class ChildRun:
    """A cell's run in MLflow: buffers metrics, and survives the death and resumption of its process."""

    def __init__(
        self, parent: str, name: str, marker: Path, params: dict[str, Any], tags: dict[str, str], *, timed: bool = True
    ) -> None:
        """Continue the run whose id ``marker`` holds, else start one and write ``marker``.

        Args:
            timed: stamp the run, its metrics and its files with the time.
        """
        self._timed = timed
        self._client = client()
        self._metrics: list[Metric] = []
        experiment_id = self._client.get_run(parent).info.experiment_id
        known = marker.read_text().strip() if marker.exists() else None
        if known and self._continue(known):
            self.run_id = known
        else:
            tags = {"mlflow.parentRunId": parent, **tags}
            self.run_id = _created(self._client, experiment_id, tags, name, timed)
            self._client.log_batch(self.run_id, params=[Param(key, str(value)) for key, value in params.items()])
            marker.write_text(self.run_id)

    def _continue(self, run_id: str) -> bool:
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False  # another server, or a store that was emptied
        return True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Buffer metrics of a step; infinities are logged as they are."""
        now = int(time.time() * 1000) if self._timed else NO_TIME
        self._metrics += [Metric(key, float(value), now, step) for key, value in metrics.items()]
        if len(self._metrics) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Send what is buffered."""
        for start in range(0, len(self._metrics), _BATCH):
            self._client.log_batch(self.run_id, metrics=self._metrics[start : start + _BATCH])
        self._metrics = []

    def tag(self, tags: dict[str, str]) -> None:
        """Set tags."""
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def artifact(self, path: Path) -> None:
        """Upload a file or a folder under its own name."""
        send(self.run_id, path, path.name if path.is_dir() else None, timed=self._timed)

    def end(self, status: str = "FINISHED") -> None:
        """Flush and close the run."""
        self.flush()
        _terminate(self._client, self.run_id, status, self._timed)


def send(run_id: str, path: Path, folder: str | None = None, *, timed: bool = True) -> None:
    """Add a file, or what a folder holds, to a run's ``folder``.

    Args:
        timed: leave the files of a local store with the time at which they were sent. A server stamps its own.
    """
    mlflow = client()
    if path.is_dir():
        mlflow.log_artifacts(run_id, str(path), artifact_path=folder)
    else:
        mlflow.log_artifact(run_id, str(path), artifact_path=folder)
    store = str(mlflow.get_run(run_id).info.artifact_uri)
    if not timed and store.startswith(("file:", "/")):
        root = Path(local_file_uri_to_path(store))
        for file in (*root.rglob("*"), root, root.parent):
            os.utime(file, (NO_TIME / 1000, NO_TIME / 1000))


def add_to_run(run_id: str, metrics: dict[str, float], artifact: Path, *, timed: bool = True) -> None:
    """Add metrics and a file to a run that has ended; nothing happens where the store does not know it.

    Each call is a step of its own: MLflow shows the last step's values, and of one step the largest.
    """
    mlflow = client()
    try:
        known = mlflow.get_metric_history(run_id, next(iter(metrics))) if metrics else []
        step = 1 + max((metric.step for metric in known), default=-1)
        mlflow.log_batch(run_id, metrics=[Metric(key, value, NO_TIME, step) for key, value in metrics.items()])
        send(run_id, artifact, timed=timed)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def flow_tag(telemetry: str, flow_run: str) -> dict[str, str]:
    """Which flow made a run; none where times must not be told, for a number that Prefect's server gives is a time."""
    return {"prefect_flow_run": flow_run} if timed(telemetry) else {}


def git_commit() -> str:
    """The commit of the working tree, with "+changes" if it differs; "none" outside git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return commit + ("+changes" if changed else "")


def dvc_hash(output: Path) -> str:
    """DVC's hash of an output, from dvc.lock; "none" outside a DVC pipeline."""
    try:
        stages = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return "none"
    for stage in stages.values():
        for out in stage.get("outs", []):
            if out["path"] == output.as_posix():
                return str(out.get("md5", "none"))
    return "none"


def _experiment_id(mlflow: MlflowClient, name: str) -> str:
    found = mlflow.get_experiment_by_name(name)
    if found:
        return str(found.experiment_id)
    local = tracking_uri().startswith("sqlite:")
    location = (DATA / "mlartifacts").resolve().as_uri() if local else None
    return str(mlflow.create_experiment(name, artifact_location=location))
