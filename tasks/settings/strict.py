"""Base of the sections of params.yaml, and types of entries that are texts; ``core.bounds`` has the numbers."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from dptune.core.errors import ConfigError
from dptune.core.units import check_unit


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


class StrictModel(BaseModel):
    """The base of whatever is read from a file of settings: an unknown entry is an error, and nothing changes later."""

    model_config = STRICT

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """pydantic's hook: the model's own schema, whose numbers are plain."""
        return plain_numbers(handler(kind), handler)


def as_value_error(check: Callable[..., Any], *arguments: Any) -> None:
    """Call the check; a ConfigError becomes a ValueError, to which pydantic adds the entry's name."""
    try:
        check(*arguments)
    except ConfigError as error:
        raise ValueError(text_of(error)) from None


def text_of(error: ConfigError) -> str:
    """Problem and fix without the field, which pydantic names; ``tasks.settings.strict_yaml`` takes the two apart."""
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
