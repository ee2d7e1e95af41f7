"""What MLflow keeps of a run besides figures and files: the data sets that it read, and the model that it made.

A data set is described and never sent: a name, a digest and what is public of it. MLflow stamps a model of its own with
the time at which it was logged, so the model of a run whose times must not be told lies with the run's files instead.
Both are found under ``runs:/<run id>/<model_name>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dptune.core.files import write_text

if TYPE_CHECKING:  # only tasks.mlflow.tracking imports MLflow, after it has set its environment
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

#: Metrics of a model, and the data sets that they were measured on, by what these were read for.
_REACHED = ("perplexity/", "epsilon/")
_MEASURED_ON = {"perplexity/eval": "evaluation", "perplexity/public": "validation"}
_SCHEMA = {"mlflow_colspec": [{"type": "string", "name": "text", "required": True}]}
_CONTEXT = "mlflow.data.context"


@dataclass(frozen=True)
class InputData:
    """A data set that a run read. Public.

    Attributes:
        name: its public description.
        digest: the same for the same data; of at most 36 characters.
        context: what it was read for: training, evaluation or validation.
        source: the file that holds it.
        profile: what is public of its content, such as the number of units.
    """

    name: str
    digest: str
    context: str
    source: str
    profile: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, which ``log_inputs`` takes."""
        return asdict(self)


def log_inputs(mlflow: MlflowClient, run_id: str, inputs: list[Mapping[str, Any]]) -> None:
    """Add data sets to a run's inputs; one that it has already is not added again."""
    mlflow.log_inputs(run_id, [_dataset_input(one) for one in inputs])


def _dataset_input(one: Mapping[str, Any]) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=one["name"],
        digest=one["digest"],
        source_type="local",
        source=json.dumps({"uri": one["source"]}),
        schema=json.dumps(_SCHEMA),
        profile=json.dumps(one["profile"]),
    )
    return DatasetInput(dataset, [InputTag(_CONTEXT, one["context"])])


def model_name(label: str) -> str:
    """The name of a cell's model, and of its folder where it lies with the run's files: MLflow refuses dots.

    >>> model_name("small.static.eps0.5.seed0")
    'small-static-eps0-5-seed0'
    """
    return re.sub(r"[/:.%\"']", "-", label)


def log_model(mlflow: MlflowClient, run_id: str, folder: Path, name: str, note: str) -> None:
    """Add a folder that ``mlflow.pyfunc.save_model`` wrote as a model of the run, once. MLflow stamps it with the time.

    The run's last perplexities and epsilons become the model's too, with the data sets that they were measured on.

    Args:
        name: as ``model_name`` gives it.
        note: the model's description, in Markdown.
    """
    from mlflow.entities import LoggedModelOutput, Metric

    run = mlflow.get_run(run_id)
    known = mlflow.search_logged_models([run.info.experiment_id], filter_string=f"source_run_id = '{run_id}'")
    model = next(iter(known), None) or mlflow.create_logged_model(
        run.info.experiment_id, name=name, source_run_id=run_id, tags={"mlflow.note.content": note}, model_type="LoRA"
    )
    if model.status == "READY":  # an earlier call was interrupted after this one's last step
        return
    file = folder / "MLmodel"
    write_text(file, yaml.safe_dump(yaml.safe_load(file.read_text("utf-8")) | {"model_id": model.model_id}))
    mlflow.log_model_artifacts(model.model_id, str(folder))
    mlflow.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    read = run.inputs.dataset_inputs if run.inputs else []
    data = {tag.value: one.dataset for one in read for tag in one.tags if tag.key == _CONTEXT}
    for key in (key for key in run.data.metrics if key.startswith(_REACHED)):
        last, on = mlflow.get_metric_history(run_id, key)[-1], data.get(_MEASURED_ON.get(key, ""))
        about = {"dataset_name": on.name, "dataset_digest": on.digest} if on else {}
        point = Metric(key, last.value, last.timestamp, last.step, model_id=model.model_id, **about)
        mlflow.log_batch(run_id, metrics=[point])  # the run has it already, which MLflow sees
    mlflow.finalize_logged_model(model.model_id, "READY")
