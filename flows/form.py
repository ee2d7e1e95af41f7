"""What a deployment's form offers: which entry of params.yaml each field stands for, and the file's value of it.

The sections' own models check what is given, so a form takes what the file takes, and refuses it in the same words.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema

from dptune.core.errors import DptuneError
from tasks.settings.params import LoraSection, Settings, TrainingSection, load_settings, merge

#: The field with sections that are merged over the file, for all that a form has no field of its own for.
OVERRIDES = "overrides"
#: Sections of which a form has every entry, but for those that it has a field of its own for.
_SECTIONS = {"training": "training", "lora": "lora"}
_GRID = {
    "name": "experiment.name",
    "mechanisms": "experiment.mechanisms",
    "epsilons": "experiment.epsilons",
    "seeds": "experiment.seeds",
    "epochs": "training.epochs",
    **_SECTIONS,
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
        **_SECTIONS,
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
    shown = {field: _entry(content, path) for field, path in FIELDS[deployment].items()}
    for field in (field for field in _SECTIONS if field in shown):
        own = _own_fields(field)
        shown[field] = {name: value for name, value in shown[field].items() if name not in own}
    return shown | {OVERRIDES: {}}


def _own_fields(section: str) -> list[str]:
    """Entries of a section that forms have a field for."""
    return [path.partition(".")[2] for path in _GRID.values() if path.startswith(f"{section}.")]


def _entry(content: dict[str, Any], path: str) -> Any:
    found: Any = content
    for key in path.split("."):
        found = found[key]
    return found


def changes(deployment: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sections to merge over params.yaml for what a form was given; its ``overrides`` win over its fields."""
    merged: dict[str, Any] = {}
    for field, path in FIELDS[deployment].items():
        value = given.get(field, {})
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


class _OfferedSection:
    """Annotation of a section's entries: its form has a field for each, made of the field of the section's class."""

    def __init__(self, name: str, section: Any) -> None:
        self.name, self.section = name, section

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """pydantic's hook: the schema of the section. What is left out is the file's, so nothing is required."""
        found = TypeAdapter(self.section).json_schema()
        own = _own_fields(self.name)
        entries = {name: entry for name, entry in found["properties"].items() if name not in own}
        return handler(schema) | {"properties": entries, "additionalProperties": False}


Label = Annotated[str, _OfferedLabel()]
Training = Annotated[dict[str, Any], _OfferedSection("training", TrainingSection)]
LoraEntries = Annotated[dict[str, Any], _OfferedSection("lora", LoraSection)]
