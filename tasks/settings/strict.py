"""Strict settings: base of the sections of params.yaml, types of entries that are texts, and how the YAML is read.

``core.declarations`` has the types of numbers.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticKnownError, core_schema
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

from dptune.core.declarations import assignments, sentences
from dptune.core.errors import ConfigError, problem_of
from dptune.core.settings import check_unit


def plain_numbers(schema: CoreSchema, handler: GetCoreSchemaHandler) -> CoreSchema:
    """Let every number of a schema refuse all that is none, and every boolean all else. Returns the schema.

    What lies behind a reference has a hook of its own: a section is a StrictModel, or marked as a LibrarySection.
    """
    if schema["type"] != "definition-ref":
        plain: CoreSchema = _plain(schema)
        return plain
    referred: Any = handler.resolve_ref_schema(schema)
    referred.update(_plain(referred))
    return schema


class PlainNumbers:
    """Marks a type outside of a section: ``TypeAdapter(Annotated[Epsilons, PlainNumbers()])``."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's hook: the type's own schema, whose numbers are plain."""
        return plain_numbers(handler(kind), handler)


def _is_number(value: Any) -> bool:
    """Whether it is a real number; a boolean is none, nor are a text and bytes. numpy's boolean is no Real."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _whole(value: Any) -> Any:
    if not _is_number(value):
        raise PydanticKnownError("int_type")
    return value


def _number(value: Any) -> Any:
    if not _is_number(value):
        raise PydanticKnownError("float_type")
    return value


_CHECKS = {"int": _whole, "float": _number}
#: Keys of a schema that hold no further schema.
_OTHERS = ("metadata", "serialization", "config", "default", "function", "cls")


def _plain(part: Any) -> Any:
    """The schema, or the part of one, with a check before each number; one that has been here is left as it is."""
    if isinstance(part, list | tuple):
        return type(part)(map(_plain, part))
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind in _CHECKS:
        return core_schema.no_info_before_validator_function(_CHECKS[kind], part)
    if kind == "bool":
        return part | {"strict": True}
    if kind == "function-before" and part["function"]["function"] in _CHECKS.values():
        return part
    return {key: value if key in _OTHERS else _plain(value) for key, value in part.items()}


_LONGEST_NAME = 64  # a run's folder holds the names of a model and a mechanism, and file systems stop at 255 bytes
_LONGEST_PATH = 4096


#: pydantic's configuration of whatever is read from a file of settings.
STRICT = ConfigDict(extra="forbid", frozen=True)
Plan = TypeVar("Plan", bound=BaseModel)


class StrictModel(BaseModel):
    """The base of whatever is read from a file of settings: an unknown entry is an error, and nothing changes later."""

    model_config = STRICT

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's hook: the model's own schema, whose numbers are plain."""
        return plain_numbers(handler(kind), handler)


def read_plan(kind: type[Plan], file: Path, flow: str) -> Plan:
    """Read what a flow wrote for a process of its own. Raises: ConfigError if the file holds no such plan."""
    try:
        return kind.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(str(file), f"is not {flow}'s plan", fix=f"run python -m flows.{flow}") from None


def as_value_error(check: Callable[..., Any], *arguments: Any) -> None:
    """Call the check; a ConfigError becomes a ValueError, to which pydantic adds the entry's name."""
    try:
        check(*arguments)
    except ConfigError as error:
        raise ValueError(text_of(error)) from None


def text_of(error: ConfigError) -> str:
    """Problem and fix without the field, which pydantic names; ``tasks.settings.strict`` takes the two apart."""
    return f"{error.problem}. Fix: {error.fix}"


def printable(text: str) -> str:
    """Return the text. Raises ValueError if it has control characters."""
    if not text.isprintable():
        raise ValueError("holds a character that is not printable")
    return text


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values. Raises ValueError naming one that is given twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{value!r} is given twice")
    return values


def _usable_path(value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, str | Path) else "."
    if not text:
        raise ValueError("is an empty text: give a file, or leave the entry empty")
    if "\0" in text or len(os.fsencode(text)) > _LONGEST_PATH:
        raise ValueError(f"is not a path: it holds a NUL character, or is longer than {_LONGEST_PATH} bytes")
    return value


def _unit(name: str) -> str:
    as_value_error(check_unit, name, "unit")
    return printable(name)


#: Name of a model or a study, which becomes part of a folder's name.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=_LONGEST_NAME)]
Title = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(printable)]
FilePath = Annotated[Path, BeforeValidator(_usable_path)]
#: "record", or the name of a column.
Unit = Annotated[str, Field(max_length=200), AfterValidator(_unit)]

_MOST = 10_000


def combinations(lists: Any) -> list[dict[str, Any]]:
    """Every choice of one value from each list, by name. Raises: ValueError unless ``lists`` is a table of lists."""
    if not (isinstance(lists, dict) and all(isinstance(values, list) and values for values in lists.values())):
        raise ValueError("is not a table of options with lists of values")
    if math.prod(map(len, lists.values())) > _MOST:
        raise ValueError(f"makes more than {_MOST} entries")
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


# YAML of settings: a key that is given twice is refused, and a wrong entry is named with its line, value and fix.


class _OnceLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises: ConstructorError naming the line of the second key."""
        if isinstance(node, MappingNode):  # a merge key may lead to something else
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                if (name := (key.tag, key.value)) in seen:
                    raise ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                seen.add(name)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


# DVC reads and writes YAML 1.2. PyYAML reads 1.1, in which NO is false, 010 is 8, 1:30 is 90, 1:30.5 is 90.5, 1e-05 a
# text and 2026-11-29 a date: the label "NO" of a profile came back as false. Here all but 1e-05 are texts, as in 1.2
# (which takes 010 for 10).
_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "bool": (r"(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"([-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$", "-+0123456789"),
    "float": (
        r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"
        r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
        "-+.0123456789",
    ),
}
_OTHERWISE = {f"{_TAG}{name}" for name in (*_SCALARS, "timestamp")}
_OnceLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in _OTHERWISE]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _SCALARS.items():
    _OnceLoader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(_pattern), list(_first))


def load_yaml(text: str) -> Any:
    """The content of a YAML document.

    Raises: ValueError whose message says what is wrong, and on which line where that is known.
    """
    return copy.deepcopy(_parsed(text))


@lru_cache(maxsize=8)
def _parsed(text: str) -> Any:
    """The content, kept for those who read the same file again: a flow does so for each of its parts.

    PyYAML's faster parser in C is no choice: it ends the process at deep nesting.
    """
    try:
        return yaml.load(text, _OnceLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError((f"line {mark.line + 1}: " if mark else "") + str(error.problem)) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(str(error).splitlines()[0]) from None


def load_assignments(options: Iterable[str]) -> dict[str, Any]:
    """Values of ``--set NAME=VALUE`` options, read as YAML. Raises: ConfigError by name, also for one given twice."""
    values: dict[str, Any] = {}
    for name, text in assignments(options).items():
        try:
            values[name] = load_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--set {name}", f"is not a value ({error})", fix="write NAME=VALUE") from None
    return values


_FIX = "correct these entries"


def refusal(error: ValidationError, field: str, content: Any, text: str = "") -> ConfigError:
    """The error that a user reads.

    Args:
        field: name of the file or of the option.
        content: the content that was validated.
        text: text of the YAML file, for the lines of its entries; empty if the entries come from elsewhere too.
    """
    problems, fixes = [], []
    for item in error.errors():
        if item["type"] == "too_short" and item.get("input"):
            continue  # its entries are wrong, which is said of each of them
        path = _path(item["loc"], content)
        problem, _, fix = problem_of(item).partition(". Fix: ")
        name = ".".join(map(str, path))
        problems.append(f"{name}: {problem}{_line(text, path)}" if name else problem)
        if fix:
            fixes.append(fix.rstrip("."))
    return ConfigError(field, "; ".join(dict.fromkeys(problems)), fix="; ".join(dict.fromkeys(fixes)) or _FIX)


def _path(place: tuple[int | str, ...], content: Any) -> list[int | str]:
    """The path of an entry in the file. Where several types are allowed, pydantic adds the type that it tried."""
    path: list[int | str] = []
    for number, part in enumerate(place, start=1):
        if isinstance(content, Mapping) and (part in content or number == len(place)):
            content = content.get(part)
        elif isinstance(content, list | tuple) and isinstance(part, int) and part < len(content):
            content = content[part]
        else:
            continue
        path.append(part)
    return path


@lru_cache(maxsize=1)
def _composed(text: str) -> yaml.Node | None:
    """The nodes of the file, kept for all entries of one error."""
    found: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    return found


def _line(text: str, path: list[int | str]) -> str:
    """The line of an entry in the file; empty where the file does not have it."""
    node = _composed(text) if text and path else None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        else:
            node = None
    return "" if node is None else f" (line {node.start_mark.line + 1})"


# Sections that hold a dataclass of the library, so that names, types, defaults and bounds are written once.


Part = TypeVar("Part")


@dataclass(frozen=True)
class LibrarySection:
    """Marks the type of a section that is a dataclass of the library, or extends one: ``Annotated[Lora,
    LibrarySection(("rank",))]``.

    pydantic checks the entries by the dataclass's types and bounds. What the dataclass itself refuses becomes an error
    that names the entry.

    Attributes:
        required: entries that the file must have, though the dataclass has a default.
    """

    required: tuple[str, ...] | Literal["all"] = ()

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's hook: the schema of the dataclass, within a check of what is missing or refused."""
        required = tuple(field.name for field in fields(kind)) if self.required == "all" else self.required

        def validate(value: Any, make: core_schema.ValidatorFunctionWrapHandler) -> Any:
            missing = [name for name in required if name not in value] if isinstance(value, Mapping) else []
            if missing:
                details = [InitErrorDetails(type="missing", loc=(name,), input=value) for name in missing]
                raise ValidationError.from_exception_data(kind.__name__, details)
            try:
                return make(value)
            except ConfigError as error:
                raise _located(error, value, kind) from None

        return core_schema.no_info_wrap_validator_function(validate, plain_numbers(handler(kind), handler))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """pydantic's hook: the schema of the section, in which each entry has its sentence, for forms."""
        found = handler(schema)
        section = handler.resolve_ref_schema(found)
        cls = schema.get("schema", {}).get("cls")
        for name, text in (sentences(cls) if cls else {}).items():
            if name in section.get("properties", {}):
                section["properties"][name].setdefault("description", text)
        return found


def read_section(kind: type[Part], entries: Mapping[str, Any]) -> Part:
    """The section with these entries. Raises: ValidationError naming each entry that is unknown or out of range."""
    made: Part = _adapter(kind).validate_python(entries)
    return made


def as_json(section: Any) -> dict[str, Any]:
    """The entries of a section, as JSON types."""
    entries: dict[str, Any] = _adapter(type(section)).dump_python(section, mode="json")
    return entries


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[kind, LibrarySection()])


def _located(error: ConfigError, value: Any, kind: Any) -> ValidationError:
    """The library's refusal as pydantic's, about the entry that it names."""
    name = error.field.rpartition(".")[2]
    given = value.get(name) if isinstance(value, Mapping) else value
    details = InitErrorDetails(type="value_error", loc=(name,), input=given, ctx={"error": ValueError(text_of(error))})
    return ValidationError.from_exception_data(kind.__name__, [details])
