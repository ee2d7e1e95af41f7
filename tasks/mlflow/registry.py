"""MLflow's registry: a model for each study, a version for each cell with a guarantee, an alias for the one to take.

MLflow stamps a version with the time, so cells whose times must stay private are not registered. Nor is a cell without
a certified epsilon, because people use what a registry holds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from dptune.core.digits import at_most
from dptune.privacy.run_folder import RunFolder
from tasks.mlflow.tracking import LATER, client, optional, timed, tracking_uri

#: Alias of the version that the report says to take: ``models:/dptune-STUDY@best-certified``.
ALIAS = "best-certified"


def register(parent: str, study: str, results: Sequence[Mapping[str, Any]], folders: Sequence[Path], best: str) -> None:
    """Register the certified cells of a study that are not registered yet, and let the alias name the best of them.

    Args:
        parent: run id of the experiment's, or ``LATER``.
        folders: the cells' folders, in the order of ``results``.
        best: label of the cell that the report says to take; empty for none.
    """
    if parent == LATER:
        return
    with optional("the registry of models"), _named_server():
        mlflow, name = client(), registered_name(study)
        versions = _versions(mlflow, name)
        for result, folder in zip(results, folders, strict=True):
            marker, certified = RunFolder(folder).mlflow_run, float(result["epsilon_certified"])
            if math.isinf(certified) or not timed(str(result["telemetry"])) or not marker.exists():
                continue
            run = marker.read_text(encoding="utf-8").strip()
            if run not in versions and (model := _model_of(mlflow, run)):
                versions[run] = _add(mlflow, name, run, model, result)
            if result["label"] == best and run in versions:
                mlflow.set_registered_model_alias(name, ALIAS, versions[run])


def registered_name(study: str) -> str:
    """A study's model in the registry, which other tools use too: "default" alone would say nothing there."""
    return "dptune-" + re.sub(r"[/:]", "_", study)


@contextmanager
def _named_server() -> Iterator[None]:
    """Name the database to all of MLflow: it looks a version's model up in whatever the environment names."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = tracking_uri()
    try:
        yield
    finally:
        if before is None:
            del os.environ["MLFLOW_TRACKING_URI"]


def _versions(mlflow: MlflowClient, name: str) -> dict[str, str]:
    """The versions that a model has, by their runs' ids."""
    return {str(one.run_id): str(one.version) for one in mlflow.search_model_versions(f"name = '{name}'")}


def _model_of(mlflow: MlflowClient, run: str) -> str | None:
    """The id of the model that a run logged; None for none, as a classifier's."""
    experiment = mlflow.get_run(run).info.experiment_id
    found = mlflow.search_logged_models([experiment], filter_string=f"source_run_id = '{run}'")
    return next((str(one.model_id) for one in found if one.status == "READY"), None)


def _add(mlflow: MlflowClient, name: str, run: str, model: str, result: Mapping[str, Any]) -> str:
    """Add a version, and the model if it is its first. Returns its number."""
    try:
        mlflow.create_registered_model(
            name, description="Adapters with a certified epsilon; the versions' tags name it."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {
        "cell": str(result["label"]),
        "mechanism": str(result["mechanism"]),
        "epsilon_certified": at_most(result["epsilon_certified"]),
        "delta": at_most(result["delta"]),
        "unit": str(result["unit"]),
        "adapter_sha256": str(result.get("adapter_sha256") or ""),
    }
    made = mlflow.create_model_version(
        name, f"models:/{model}", run, tags=tags, description=str(result["guarantee"]), model_id=model
    )
    return str(made.version)
