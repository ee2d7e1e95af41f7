"""The page of params.yaml, from the schema of the settings models and the file's own values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import docstring_parser
import yaml
from pydantic import BaseModel, ValidationError

from docs.generate.tables import code, plain, table
from dptune.core.declarations import sentences
from tasks.settings.params import Settings

PARAMS = Path(__file__).parents[2] / "params.yaml"
#: What a value that is too long for a cell becomes.
_LONG = "see the file"
_LONGEST = 60
_ABOUT = """# params.yaml

You get every key of `params.yaml`, its type and bounds, the value that the file has, and what it means. The
table is generated from the models that check the file, so a key that is not here is refused by name, as is a value
out of bounds.

    make repro                                        # runs what a change touches, and only that
    make repro PROFILE=profiles/tiny.yaml             # with values of a ready-made study; the file stays as it is

A key whose column "left out" says *required* must be in the file; the others have the value that is shown there. A
dot goes one level down: `data.synthetic.seed` is `seed` within `synthetic` within `data`. NAME stands for a name
that you choose.
"""


@dataclass(frozen=True)
class Entry:
    """One key of params.yaml.

    Attributes:
        path: its place, level by level.
        kind: type and bounds, in words.
        default: the value if it is left out, as YAML; "required" if it may not be.
        meaning: what it sets; empty if no docstring says so.
    """

    path: tuple[str, ...]
    kind: str
    default: str
    meaning: str


def page() -> str:
    """The page in Markdown."""
    values = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    sections: dict[str, list[Entry]] = {}
    for entry in entries():
        sections.setdefault(entry.path[0], []).append(entry)
    return _ABOUT + "".join(_section(name, found, values) for name, found in sections.items())


def _section(name: str, found: list[Entry], values: Mapping[str, Any]) -> str:
    schema = _resolved(_SCHEMA["properties"][name])
    rows = [
        (code(".".join(one.path)), plain(one.meaning), one.kind, code(_value(one.path, values)), one.default)
        for one in found
    ]
    about = f"{plain(_summary(schema))}\n\n" if "$ref" in _SCHEMA["properties"][name] else ""
    return f"\n## {name}\n\n{about}" + table(("key", "meaning", "type and bounds", "in the file", "left out"), rows)


def entries() -> list[Entry]:
    """All keys, in the order of the models."""
    values = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    return list(_entries(_SCHEMA, (), values))


def _entries(model: Mapping[str, Any], path: tuple[str, ...], values: dict[str, Any]) -> Iterator[Entry]:
    texts, required = sentences(_CLASSES[model["title"]]), _required(path, values)
    for name, schema in model["properties"].items():
        here, inner = (*path, name), _inner(schema)
        if inner is None:
            default = "*required*" if name in required else _default(schema)
            yield Entry(here, _kind(schema), default, texts.get(name, ""))
        else:
            yield from _entries(inner[0], (*here, *inner[1]), values)


def _required(path: tuple[str, ...], values: dict[str, Any]) -> set[str]:
    """The keys whose absence is an error, found by leaving all of them out: a section may hold a library's dataclass,
    whose defaults do not count there.
    """
    content: Any = {}
    for place in range(len(path) - 1, -1, -1):
        around = _at(path[:place], values)
        content = (around if isinstance(around, dict) else {}) | {path[place]: content}
    try:
        Settings.model_validate(content)
    except ValidationError as error:
        missing = [one["loc"] for one in error.errors() if one["type"] == "missing"]
        return {str(place[-1]) for place in missing if place[:-1] == path}
    return set()


def _at(path: tuple[str, ...], values: Any) -> Any:
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _inner(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]] | None:
    """The model that a key holds, with NAME if it holds one for each name; None for a plain value."""
    named = list(schema.get("patternProperties", {}).values())
    for one, path in [(schema, ()), *((each, ("NAME",)) for each in named), *((each, ()) for each in _choices(schema))]:
        if "properties" in _resolved(one):
            return _resolved(one), path
    return None


def _choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in schema.get("anyOf", []) if one.get("type") != "null"]


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return _SCHEMA["$defs"][reference.rpartition("/")[2]] if reference else schema


def _summary(model: Mapping[str, Any]) -> str:
    parsed = docstring_parser.parse(model.get("description", ""))
    return " ".join(f"{parsed.short_description or ''} {parsed.long_description or ''}".split())


def _classes(kind: Any) -> dict[str, type]:
    """The models and dataclasses within an annotation, by name."""
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
        inner = [_classes(one) for one in get_type_hints(kind, include_extras=True).values()]
        return {kind.__name__: kind} | {name: cls for found in inner for name, cls in found.items()}
    return {name: cls for one in get_args(kind) for name, cls in _classes(one).items()}


def _kind(schema: Mapping[str, Any]) -> str:
    if choices := _choices(schema):
        kinds = [_kind(one) for one in choices]
        return " or ".join(kinds + ["empty"] * (len(choices) < len(schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(code(str(one)) for one in schema["enum"])
    if "const" in schema:
        return code(json.dumps(schema["const"]).strip('"'))
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}" + (", not empty" if schema.get("minItems") else "")
    if schema.get("type") == "object":
        return "table"
    names = {"integer": "whole number", "string": "text", "boolean": "true or false", "number": "number"}
    return names[schema["type"]] + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None:
        return f", {_number(least)} to {_number(most)}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    return "".join(f", {word} {_number(schema[key])}" for key, word in words.items() if key in schema)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.12g}"


def _default(schema: Mapping[str, Any]) -> str:
    return code(_yaml(schema["default"])) if schema.get("default") is not None else "empty"


def _value(path: tuple[str, ...], values: Any) -> str:
    """The file's value at a path, as YAML; nothing if it has none."""
    for place, name in enumerate(path):
        if name == "NAME" and isinstance(values, Mapping):
            found = {_value(path[place + 1 :], one) for one in values.values()}
            return found.pop() if len(found) == 1 else _LONG
        if not isinstance(values, Mapping) or name not in values:
            return ""
        values = values[name]
    return _yaml(values)


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).removesuffix("\n...\n").strip()
    text = "" if text == "null" else text
    return text if len(text) <= _LONGEST else _LONG


_SCHEMA = Settings.model_json_schema()
_CLASSES = _classes(Settings)
