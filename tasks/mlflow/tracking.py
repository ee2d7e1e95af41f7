"""MLflow: one parent run per experiment, one child per cell. Nothing but what it is handed reaches it.

Logging never stops a run. What MLflow does not take is kept in the run's folder, and sent when the flow runs again.

A run whose times must not be told is stamped with ``NO_TIME`` wherever MLflow stamps: its start, its end, its metrics
(those sent later too), and its files in a local store. How long a run takes follows the number of its micro-batches,
hence the secret size of each batch.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import requests
import yaml

from dptune.core.files import locked, private_directory, write_text
from tasks.metrics import legible, tool_name
from tasks.mlflow.entities import InputData, log_inputs, log_model
from tasks.mlflow.experiments import experiment_id, repair_paths
from tasks.mlflow.unsent import Unsent
from tasks.paths import DATA, TRAIN

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# MLflow's own patience with a server that does not answer is 15 minutes, in which a run would stand still.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
# Bars for files that are copied from one folder to another would fill the log.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Alembic's start-up chatter says nothing to a user. MLflow writes a traceback for each request that its database
# refuses; ``_warn`` says the same in a sentence.
logging.getLogger("alembic").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)

from mlflow import MlflowClient  # noqa: E402 (the environment decides what its import does)
from mlflow.entities import LifecycleStage, Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.utils.file_utils import local_file_uri_to_path  # noqa: E402

#: In place of the parent's run id where no server answers: children then write to their folders alone.
LATER = "later"
#: Milliseconds since 1970 that stand for every time of a run that tells none; MLflow takes 0 for "now".
NO_TIME = 1
#: In data: held while a flow finds or starts the experiment's run.
MLFLOW_LOCK = "mlflow.lock"
#: Tag of the description of a run or an experiment, in Markdown.
NOTE = "mlflow.note.content"
_PARENT_TAG = "dptune.parent"
BATCH, _LONGEST_NAME = 500, 250  # MLflow's own
_PROBE_SECONDS = 5
_log = logging.getLogger(__name__)


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, else a SQLite file in data/."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return given
    file = (DATA / "mlflow.db").resolve()
    # Relative where % or ? in the whole path would mean another file; every process works in this directory. Escaped,
    # SQLAlchemy finds the file, but MLflow makes folders of the escaped name beside it.
    return f"sqlite:///{DATA / 'mlflow.db' if set('%?') & set(str(file)) else file}"


def client() -> MlflowClient:
    """A client of the tracking server in use.

    Raises: ConnectionError if a server is named and does not answer; asked once, before MLflow's own retries.
    """
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        try:
            requests.head(uri, timeout=_PROBE_SECONDS, allow_redirects=False)
        except (requests.RequestException, ValueError) as error:
            raise ConnectionError(f"no answer from {uri}: {type(error).__name__}") from None
    return MlflowClient(tracking_uri=uri)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Logging that may fail: its error becomes a warning that names cause and fix, and the work goes on."""
    try:
        yield
    except Exception as error:
        _warn(what, error)


def _warn(what: str, error: Exception) -> None:
    cause = " ".join(str(error).partition("[SQL:")[0].split())[:200] or type(error).__name__
    named = os.environ.get("MLFLOW_TRACKING_URI") and "data/mlflow.db" not in tracking_uri()
    server, file = "start that server, or unset the variable to use data/mlflow.db", "free or restore data/mlflow.db"
    refused = isinstance(error, MlflowException) and "[SQL:" not in str(error) and "sqlite3" not in str(error)
    fix = "mend what MLflow names" if refused else server if named else file
    _log.warning(
        "MLFLOW_TRACKING_URI: MLflow did not take %s (%s). The work goes on, and its results stay on disk. Fix: %s; "
        "then run the flow again, as `python -m flows.experiment` (DVC skips what is done), which sends them.",
        what,
        cause,
        fix,
    )


def timed(telemetry: str) -> bool:
    """Whether the times of a run may be told."""
    return telemetry == "research"


def parent_run(experiment: str, tags: dict[str, str], *, timed: bool = True) -> str:
    """The run id of the experiment's parent run: found by its name, or started. ``LATER`` where no server answers.

    Args:
        timed: stamp a new one with the time.
    """
    with optional(f"the experiment {experiment}"), locked(private_directory(DATA) / MLFLOW_LOCK, wait=True):
        # One flow at a time: two would each make the tables of a new database, or a parent.
        return _parent_run(client(), experiment, tags, timed)
    return LATER


def _parent_run(mlflow: MlflowClient, experiment: str, tags: dict[str, str], timed: bool) -> str:
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        repair_paths()
    number = experiment_id(mlflow, experiment, local=tracking_uri().startswith("sqlite:"))
    found = mlflow.search_runs([number], f"tags.`{_PARENT_TAG}` = 'true'", max_results=1)
    run_id = str(found[0].info.run_id) if found else _created(mlflow, number, {_PARENT_TAG: "true"}, experiment, timed)
    for key, value in tags.items():
        mlflow.set_tag(run_id, key, value)
    return run_id


def finish_parent(run_id: str, failed: bool, *, timed: bool = True) -> None:
    """Mark the parent run as ended."""
    if run_id != LATER:
        with optional("the end of the experiment"):
            _terminate(client(), run_id, "FAILED" if failed else "FINISHED", timed)


def _created(mlflow: MlflowClient, experiment_id: str, tags: dict[str, str], name: str, timed: bool) -> str:
    source = {"mlflow.source.name": "dptune", "mlflow.source.type": "LOCAL"}  # what MLflow's columns show
    if (commit := git_commit().removesuffix("+changes")) != "none":
        source["mlflow.source.git.commit"] = commit
    run = mlflow.create_run(experiment_id, start_time=None if timed else NO_TIME, tags=source | tags, run_name=name)
    return str(run.info.run_id)


def _terminate(mlflow: MlflowClient, run_id: str, status: str, timed: bool) -> None:
    mlflow.set_terminated(run_id, status, end_time=None if timed else NO_TIME)


def send(run_id: str, path: Path, folder: str | None = None, *, timed: bool = True) -> None:
    """Add a file, or what a folder holds, to a run's ``folder``; a failure is a warning.

    Args:
        timed: leave the files of a local store with the time at which they were sent. A server stamps its own.
    """
    if run_id != LATER:
        with optional(f"{path}"):
            _send(client(), run_id, path, folder, timed)


def _send(mlflow: MlflowClient, run_id: str, path: Path, folder: str | None, timed: bool) -> None:
    if path.is_dir():
        mlflow.log_artifacts(run_id, str(path), artifact_path=folder)
    else:
        mlflow.log_artifact(run_id, str(path), artifact_path=folder)
    store = str(mlflow.get_run(run_id).info.artifact_uri)
    if not timed and store.startswith(("file:", "/")):
        root = Path(local_file_uri_to_path(store))
        for file in (*root.rglob("*"), root, root.parent):
            os.utime(file, (NO_TIME / 1000, NO_TIME / 1000))


class ChildRun:
    """A cell's run in MLflow: survives the death and resumption of its process, and of MLflow's server.

    What is logged is first kept on disk (``Unsent``), then sent in batches; no method raises for MLflow's sake.
    """

    def __init__(
        self,
        parent: str,
        name: str,
        marker: Path,
        params: dict[str, Any],
        tags: dict[str, str],
        *,
        timed: bool = True,
        kept: bool = True,
    ) -> None:
        """Continue the run whose id ``marker`` holds, else start one and write ``marker``.

        Args:
            parent: run id of the experiment's, or ``LATER``.
            timed: stamp the run, its metrics and its files with the time.
            kept: keep what MLflow does not take beside ``marker``; False of what can be made again.
        """
        self._parent, self._name, self._marker, self._timed = parent, name, marker, timed
        self._params, self._tags = {key: str(value) for key, value in params.items()}, tags
        self._client: MlflowClient | None = None
        self._unsent = Unsent(marker.with_name(f"{marker.name}_unsent.jsonl"), kept=kept)
        self._waiting, self._patience, self._warned = 0, BATCH, False
        self.run_id = marker.read_text().strip() if marker.exists() else ""
        start = next((entry for entry in self._unsent.entries if "params" in entry), None)
        if start:  # of a process that could not send it
            self._params, self._tags = start["params"], start["tags"]
        elif not self.run_id:
            self._unsent.add({"params": self._params, "tags": self._tags})
        self.flush()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Keep metrics of a step, and now and then send them; infinities are logged as they are."""
        now = int(time.time() * 1000) if self._timed else NO_TIME
        values = {key: float(value) for key, value in metrics.items()}
        self._unsent.add({"metrics": values, "step": step, "time": now})
        self._waiting += len(values)
        if self._waiting >= self._patience:
            self.flush()

    def tag(self, tags: dict[str, str]) -> None:
        """Send tags of this run to MLflow."""
        self._unsent.add({"tags": tags})

    def inputs(self, inputs: Sequence[InputData]) -> None:
        """Name the data sets that the run reads."""
        self._unsent.add({"inputs": [one.to_dict() for one in inputs]})

    def artifact(self, path: Path) -> None:
        """Upload a file or a folder under its own name."""
        self._unsent.add({"artifact": str(path)})

    def model(self, folder: Path, name: str, note: str) -> None:
        """Upload a folder that MLflow's own API loads as a model, with the figures that were sent before; ``note``
        describes it in Markdown.
        """
        self._unsent.add({"model": str(folder), "name": name, "note": note})

    def flush(self) -> bool:
        """Send what MLflow does not have yet; whether it now has everything."""
        self._waiting = 0
        if self._parent == LATER:
            return False
        try:
            self._send()
        except Exception as error:
            if not self._warned:
                _warn(f"the metrics of {self._name}", error)
            self._warned, self._client = True, None
            self._patience *= 2  # or a server that is slow to fail would slow every step
            return False
        self._patience = BATCH
        return True

    def end(self, status: str = "FINISHED") -> bool:
        """Flush and close the run; whether MLflow has all of it."""
        if not (self.flush() and self._client):
            return False
        with optional(f"the end of {self._name}"):
            _terminate(self._client, self.run_id, status, self._timed)
            return True
        return False

    def _send(self) -> None:
        mlflow = self._client = self._client or self._connected()
        metrics: list[Metric] = []
        for entry in self._unsent.entries:
            if "metrics" in entry:
                at = (entry["time"] if self._timed else NO_TIME, entry["step"])
                # MLflow keeps an infinite figure as 1.8e308, which looks like a number; its tag says ∞.
                metrics += [_metric(key, one, *at) for key, one in entry["metrics"].items() if not math.isinf(one)]
            elif "artifact" in entry:
                path = Path(entry["artifact"])
                _send(mlflow, self.run_id, path, path.name if path.is_dir() else None, self._timed)
            elif "inputs" in entry:
                log_inputs(mlflow, self.run_id, entry["inputs"])
            elif "model" in entry:
                self._send_model(mlflow, entry)
            else:
                params = [Param(_named(key), value) for key, value in entry.get("params", {}).items()]
                tags = [RunTag(_named(key), value) for key, value in entry["tags"].items()]
                mlflow.log_batch(self.run_id, params=params, tags=tags)
        for start in range(0, len(metrics), BATCH):
            mlflow.log_batch(self.run_id, metrics=metrics[start : start + BATCH])
        self._unsent.clear()

    def _send_model(self, mlflow: MlflowClient, entry: Mapping[str, Any]) -> None:
        folder, name = Path(entry["model"]), entry["name"]
        if self._timed:
            log_model(mlflow, self.run_id, folder, name, entry["note"])
        else:
            _send(mlflow, self.run_id, folder, name, timed=False)

    def _connected(self) -> MlflowClient:
        """A client, once the run is there."""
        mlflow = client()
        if not (self.run_id and self._continue(mlflow)):
            experiment_id = mlflow.get_run(self._parent).info.experiment_id
            tags = {"mlflow.parentRunId": self._parent, **self._tags}
            self.run_id = _created(mlflow, experiment_id, tags, self._name, self._timed)
            write_text(self._marker, self.run_id)  # at once, or a failure in what follows would start another
            if not any("params" in entry for entry in self._unsent.entries):
                self._unsent.entries.insert(0, {"params": self._params, "tags": self._tags})
        return mlflow

    def _continue(self, mlflow: MlflowClient) -> bool:
        try:
            if mlflow.get_run(self.run_id).info.lifecycle_stage == LifecycleStage.DELETED:
                mlflow.restore_run(self.run_id)
                _log.warning("the run %s was deleted in MLflow, and is restored: it goes on", self._name)
            mlflow.update_run(self.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False  # another server, or a store that was emptied
        return True


def _named(key: str) -> str:
    """The name of a parameter, metric or tag as MLflow takes it: a model's or a mechanism's may hold any character."""
    return re.sub(r"[^\w.\- :/]", "_", key)[:_LONGEST_NAME]


def _metric(key: str, value: float, time: int, step: int) -> Metric:
    return Metric(_named(tool_name(key)), legible(key, float(value)), time, step)


def add_to_run(
    run_id: str,
    metrics: Mapping[str, float],
    artifact: Path | None,
    tags: Mapping[str, str] = MappingProxyType({}),
    *,
    timed: bool = True,
) -> bool:
    """Add metrics, tags and a file to a run that has ended; whether MLflow took them, or does not know the run.

    Each call is a step of its own: MLflow shows the last step's values, and of one step the largest.
    """
    if run_id == LATER:
        return False
    with optional(f"{artifact or 'figures of the experiment'}"):
        try:
            _add_to_run(client(), run_id, metrics, tags)
            if artifact:
                _send(client(), run_id, artifact, None, timed)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return True
    return False


def _add_to_run(mlflow: MlflowClient, run_id: str, metrics: Mapping[str, float], tags: Mapping[str, str]) -> None:
    metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}  # no chart shows any other
    known = mlflow.get_metric_history(run_id, _named(tool_name(next(iter(metrics))))) if metrics else []
    step = 1 + max((metric.step for metric in known), default=-1)
    values = [_metric(key, value, NO_TIME, step) for key, value in metrics.items()]
    mlflow.log_batch(run_id, metrics=values, tags=[RunTag(key, value) for key, value in tags.items()])


def flow_tag(telemetry: str, flow_run: str) -> dict[str, str]:
    """Tag with the flow that made a run; no tag if times are private, because a flow's number tells a time."""
    return {"prefect_flow_run": flow_run} if timed(telemetry) else {}


def git_commit() -> str:
    """The commit of the working tree, with "+changes" if it differs; "none" outside git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return commit + ("+changes" if changed else "")


def training_hash(telemetry: str) -> dict[str, str]:
    """DVC's hash of the training file, which holds a secret salt; none where nothing of the records may be told."""
    return {"dvc_hash": dvc_hash(TRAIN.parent)} if telemetry == "research" else {}


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
