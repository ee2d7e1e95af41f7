"""Reads YAML, and refuses a key that is given twice; a plain reader would let the last one win."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

from dptune.core.errors import ConfigError
from dptune.core.overrides import assignments


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
