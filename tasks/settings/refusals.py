"""Turns pydantic's errors into one error that names each wrong entry with its line, value and fix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml
from pydantic import ValidationError

from dptune.core.errors import ConfigError
from dptune.core.validation_errors import problem_of

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
