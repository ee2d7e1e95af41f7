"""YAML of settings: a key that is given twice is refused, and a wrong entry is named with its line, value and fix."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

from dptune.core.declarations import assignments
from dptune.core.errors import ConfigError, problem_of


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


# DVC writes 1e-05, and people 1.5e3, which YAML 1.2 takes for numbers, and YAML 1.1, which PyYAML follows, for texts.
_OnceLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


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
