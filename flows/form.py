"""What a deployment's form offers: which entry of params.yaml each field stands for, and the file's value of it.

The sections' own models check what is given, so a form takes what the file takes, and refuses it in the same words.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from dptune.errors import DptuneError
from tasks.settings.params import Settings, load_settings, merge

#: The field with sections that are merged over the file, for all that a form has no field of its own for.
OVERRIDES = "overrides"
_GRID = {
    "name": "experiment.name",
    "mechanisms": "experiment.mechanisms",
    "epsilons": "experiment.epsilons",
    "seeds": "experiment.seeds",
    "epochs": "training.epochs",
}
#: Which entry of params.yaml each field of a form stands for, by the name of the deployment.
FIELDS: dict[str, dict[str, str]] = {
    "study": _GRID,
    "experiment": {**_GRID, "runner": "experiment.runner"},
    "audit": {
        "generations": "audit.generations",
        "records": "audit.records",
        "shadows": "audit.shadows",
        "step_trials": "audit.step_trials",
        "seed": "audit.seed",
    },
    "prediction": {
        "models": "prediction.models",
        "epsilons": "prediction.epsilons",
        "tokens": "prediction.tokens",
        "public_weights": "prediction.public_weights",
        "records": "prediction.records",
    },
    "search": {
        "name": "search.name",
        "epsilon": "search.epsilon",
        "candidates": "search.candidates",
        "shape": "search.shape",
        "score": "search.score",
        "again": "search.again",
    },
    "policy": {
        "name": "policy.name",
        "seeds": "policy.seeds",
        "audit_trials": "policy.audit_trials",
        "processes": "policy.processes",
    },
}


def file_values(deployment: str, settings: Settings) -> dict[str, Any]:
    """The file's value of every field of a deployment's form, as plain data."""
    content = settings.model_dump(mode="json")
    return {field: _entry(content, path) for field, path in FIELDS[deployment].items()} | {OVERRIDES: {}}


def _entry(content: dict[str, Any], path: str) -> Any:
    found: Any = content
    for key in path.split("."):
        found = found[key]
    return found


def changes(deployment: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sections to merge over params.yaml for what a form was given; its ``overrides`` win over its fields."""
    merged: dict[str, Any] = {}
    for field, path in FIELDS[deployment].items():
        value = given[field]
        for key in reversed(path.split(".")):
            value = {key: value}
        merged = merge(merged, value)
    return merge(merged, given[OVERRIDES])


class _OfferedLabel:
    """Annotation of a mechanism's label: its form offers the labels of params.yaml."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """pydantic's hook: the schema of a text, with the labels that there are; any label without a file."""
        found = handler(schema)
        with suppress(DptuneError):
            found["enum"] = list(load_settings().mechanisms)
        return found


Label = Annotated[str, _OfferedLabel()]
