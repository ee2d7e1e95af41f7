"""Sections that hold a dataclass of the library, so that names, types, defaults and bounds are written once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from dptune.core.declarations import sentences
from dptune.core.errors import ConfigError
from tasks.settings.strict import plain_numbers, text_of

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
