"""Numbers in settings are numbers: pydantic alone takes true for 1, "8" for 8, and 1 or "yes" for true.

``epsilons: [true]`` would be a run at epsilon 1 that nobody asked for. A whole number may still be written as 1e4.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema


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
