"""Descriptions of mechanisms, their parts and options, for commands and docs."""

from __future__ import annotations

from dataclasses import dataclass

from dptune.mechanisms.options import option_rows
from dptune.mechanisms.registry import _PAIRS_HELP, PARTS, _resolve


@dataclass(frozen=True)
class PartDescription:
    """The description of a registered part, as ``dptune mechanisms --parts`` prints it.

    Attributes:
        kind: clipper, noise or controller.
        name: name in entries of params.yaml.
        summary: the first paragraph of its docstring, on one line.
        module: the module that registered it.
        options: (option, default or "required", help).
    """

    kind: str
    name: str
    summary: str
    module: str
    options: list[tuple[str, str, str]]


def describe_parts() -> list[PartDescription]:
    """Every clipper, noise and controller, plug-ins' included."""
    return [
        PartDescription(kind, name, _first_paragraph(cls), registry.module_of(name), option_rows(cls))
        for kind, registry in PARTS.items()
        for name, cls in registry.items()
    ]


def _first_paragraph(cls: type) -> str:
    return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())


def describe_options(name: str) -> list[tuple[str, str, str]]:
    """(option, default or "required", help) of a registered mechanism."""
    parts, options = _resolve(name, {})
    rows: dict[str, tuple[str, str, str]] = {}
    for cls in parts.values():
        for row in option_rows(cls, options):
            rows.setdefault(row[0], row)
    return [*rows.values(), ("pairs", "1", _PAIRS_HELP)]
