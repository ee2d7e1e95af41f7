"""What MLflow keeps of a run besides figures and files: the data sets that it read, and the model that it made.

A data set is described and never sent: a name, a digest and what is public of it. MLflow stamps a model of its own with
the time at which it was logged, so the model of a run whose times must not be told lies with the run's files instead.
Both are found under ``runs:/<run id>/adapter``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dptune.core.files import write_text

if TYPE_CHECKING:  # only tasks.mlflow.tracking imports MLflow, after it has set its environment
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput

#: Name of a run's model, and of the folder of a model that lies with the run's files.
MODEL = "adapter"
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


def log_model(mlflow: MlflowClient, run_id: str, folder: Path, note: str) -> None:
    """Add a folder that ``mlflow.pyfunc.save_model`` wrote as a model of the run, once. MLflow stamps it with the time.

    Args:
        note: the model's description, in Markdown.
    """
    from mlflow.entities import LoggedModelOutput

    experiment = mlflow.get_run(run_id).info.experiment_id
    known = mlflow.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'")
    model = next((one for one in known if one.name == MODEL), None) or mlflow.create_logged_model(
        experiment, name=MODEL, source_run_id=run_id, tags={"mlflow.note.content": note}, model_type="LoRA"
    )
    if model.status == "READY":  # an earlier call was interrupted after this one's last step
        return
    file = folder / "MLmodel"
    write_text(file, yaml.safe_dump(yaml.safe_load(file.read_text("utf-8")) | {"model_id": model.model_id}))
    mlflow.log_model_artifacts(model.model_id, str(folder))
    mlflow.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    mlflow.finalize_logged_model(model.model_id, "READY")
