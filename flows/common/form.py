"""Forms of the deployments: the entry of params.yaml that each field stands for, and the folder of what is given.

A field is a parameter of the form's function in ``flows.deployments``, and no list names it again. The sections' own
models check what is given, so a form takes what the file takes, and refuses it in the same words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema

from dptune.core.errors import DptuneError
from dptune.core.files import private_directory, write_text
from flows.common.pages import grid_name
from tasks.paths import DATA, EXPERIMENT, REPORTS
from tasks.settings.params import LoraSection, Settings, TrainingSection, load_settings, merge

#: The field with sections that are merged over the file, for all entries that a form has no field for.
OVERRIDES = "overrides"
#: The field by which a run waits for approval of its price; no entry of the file.
ASK_FIRST = "ask_first"
#: Deployments that run the grid of section ``experiment``.
GRIDS = ("study", "experiment")
#: The field that chooses among the file's base models, by name.
MODELS = "models"
#: Fields that stand for another entry than the one of their name in the form's own section.
_ELSEWHERE = {"epochs": "training.epochs", "training": "training", "lora": "lora"}
#: The sections that a study reads; others make no other study.
_READ = ("plugins", "data", "task", "canaries", "pretrain", "lora", "training", "mechanisms", "experiment", "audit")
_MOST = 60  # characters: each may take four bytes of the 255 that a folder's name may have


def path_of(deployment: str, field: str) -> str:
    """The entry of params.yaml that a field stands for: usually the one of that name in the deployment's section.

    Example:
        >>> path_of("audit", "shadows"), path_of("study", "seeds"), path_of("study", "epochs")
        ('audit.shadows', 'experiment.seeds', 'training.epochs')
    """
    section = "experiment" if deployment == "study" else deployment
    return _ELSEWHERE.get(field, f"{section}.{field}")


def file_values(deployment: str, fields: Iterable[str], settings: Settings) -> dict[str, Any]:
    """The file's value of every field of a deployment's form, as plain data."""
    content = settings.model_dump(mode="json")
    fields = list(fields)
    asks = {ASK_FIRST: False} if ASK_FIRST in fields else {}
    entries = [field for field in fields if field not in (OVERRIDES, ASK_FIRST)]
    shown = {field: _entry(content, path_of(deployment, field)) for field in entries}
    if deployment in GRIDS:
        shown[MODELS] = list(shown[MODELS])
    for section in {"training", "lora"} & shown.keys():
        own = _own_fields(section)
        shown[section] = {name: value for name, value in shown[section].items() if name not in own}
    return shown | asks | {OVERRIDES: {}}


def records_words(settings: Settings) -> str:
    """A sentence on the records of a form's runs, for the form itself cannot choose others."""
    data = settings.data
    file = f", file {data.path}" if data.path is not None else ""
    return (
        f"Records: source {data.source}{file}, unit {data.unit}. To run on others, change `data` in params.yaml: "
        "the stages that make the data read it from there."
    )


def _own_fields(section: str) -> list[str]:
    """Entries of a section that forms have a field for."""
    return [path.partition(".")[2] for path in _ELSEWHERE.values() if path.startswith(f"{section}.")]


def _entry(content: dict[str, Any], path: str) -> Any:
    found: Any = content
    for key in path.split("."):
        found = found[key]
    return found


def changes(deployment: str, given: dict[str, Any]) -> dict[str, Any]:
    """The sections to merge over params.yaml for what a form was given; its ``overrides`` win over its fields."""
    merged: dict[str, Any] = {}
    for field, value in given.items():
        if field not in (OVERRIDES, ASK_FIRST):
            if deployment in GRIDS and _is_the_files(field, value):
                continue
            for key in reversed(path_of(deployment, field).split(".")):
                value = {key: value}
            merged = merge(merged, value)
    return merge(merged, given[OVERRIDES])


def _is_the_files(field: str, value: Any) -> bool:
    """Whether a field of a grid's form leaves the file's entry as it is, which a list of names says less of."""
    if field == MODELS:
        return not value  # none chosen: all of the file's
    return field == "mechanisms" and value == list(load_settings().experiment.mechanisms)


class _OfferedLabel:
    """Annotation of a mechanism's label: its form offers the labels of params.yaml."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """pydantic's hook: the schema of a text, with the labels that there are; any label without a file."""
        found = handler(schema)
        with suppress(DptuneError):
            found["enum"] = list(load_settings().mechanisms)
        return found


class _OfferedModel:
    """Annotation of a base model's name: its form offers the names of params.yaml, and no other."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """pydantic's hook: the schema of a text, with the names that there are; any name without a file."""
        found = handler(schema)
        with suppress(DptuneError):
            found["enum"] = list(load_settings().experiment.models)
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
ModelName = Annotated[str, _OfferedModel()]
Training = Annotated[dict[str, Any], _OfferedSection("training", TrainingSection)]
LoraEntries = Annotated[dict[str, Any], _OfferedSection("lora", LoraSection)]


# Where a flow's lists and report lie: those of the workspace, which `make repro` wrote, are of params.yaml alone.


def folder_of(overrides: dict[str, Any] | None = None, params: Path = Path("params.yaml")) -> Path:
    """The folder for what runs with these overrides: data, or one of data/reports for what the file does not say."""
    settings = load_settings(params, overrides)
    if (digest := _digest(settings)) == _digest(load_settings(params)):
        return DATA
    words = re.sub(r"[^\w.]+", "-", grid_name(settings))[:_MOST].strip("-.")
    return private_directory(REPORTS) / f"{words}-{digest[:6]}"


def audit_folder_of(overrides: dict[str, Any]) -> Path:
    """The folder of an audit with these overrides. If they change ``audit``, it is one of its own, with the list of the
    cells that the other overrides trained.
    """
    folder = folder_of(overrides)
    trained = folder_of({section: value for section, value in overrides.items() if section != "audit"})
    listed = trained / EXPERIMENT.name
    if folder == trained or not listed.exists():
        return folder
    own = folder.with_name(f"{folder.name}-audit")  # in ``folder`` lies the list of a study with these overrides
    write_text(own / EXPERIMENT.name, listed.read_text(encoding="utf-8"))
    return own


def _digest(settings: Settings) -> str:
    content = settings.model_dump(mode="json", include=set(_READ))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
