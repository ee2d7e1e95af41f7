"""Options of a part: the fields of its dataclass, with values from params.yaml or ``--set``.

The help of an option is written once, in the docstring of the class; its type and default are the field's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dptune.core.declarations import sentences
from dptune.core.errors import ConfigError

#: Largest whole number of an option: a larger count overflows somewhere, or makes a loop that never ends.
_LARGEST_WHOLE = 10**12


def option_names(cls: Any) -> list[str]:
    """Names of the options; none for a class that is no dataclass."""
    return [item.name for item in _options(cls)]


def option_rows(cls: type, options: Mapping[str, Any] | None = None) -> list[tuple[str, str, str]]:
    """Rows (option, default or "required", help) of one part, with ``options`` in place of its defaults."""
    texts, over = sentences(cls), options or {}
    defaults = {item.name: "required" if item.default is MISSING else str(item.default) for item in _options(cls)}
    return [(name, str(over.get(name, default)), texts.get(name, "")) for name, default in defaults.items()]


def make_part(cls: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Build a part from those options that are its own; two parts may share one, such as ``max_grad_norm``."""
    kinds = _kinds(cls)
    mine = {
        item.name: convert(item.name, options[item.name], kinds[item.name])
        for item in _options(cls)
        if item.name in options
    }
    missing = _required_names(cls) - set(mine)
    if missing:
        name = sorted(missing)[0]
        raise ConfigError(name, "is required", fix=f"give {name}=VALUE, or let it be calibrated")
    return cls(**mine)


def differing(cls: Callable[..., Any], options: Mapping[str, Any], kept: Collection[str] = ()) -> dict[str, Any]:
    """Those of a part's own options that differ from its defaults, or are ``kept``, each converted to its type."""
    found: dict[str, Any] = {}
    for name, default in option_defaults(cls).items():
        if name in options:
            value = convert(name, options[name], _kinds(cls)[name])
            if name in kept or value != default:
                found[name] = value
    return found


def option_defaults(cls: Any) -> dict[str, Any]:
    """The default of each option; ``dataclasses.MISSING`` for one that is required."""
    factories = {item.name: item.default_factory for item in _options(cls) if item.default_factory is not MISSING}
    return {item.name: factories[item.name]() if item.name in factories else item.default for item in _options(cls)}


@cache
def _kinds(cls: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _options(cls: Any) -> list[Any]:
    if not is_dataclass(cls):
        return []
    return [item for item in fields(cls) if item.init and not item.name.startswith("_")]  # "_..." is state


def _required_names(cls: Any) -> set[str]:
    return {item.name for item in _options(cls) if item.default is item.default_factory is MISSING}


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert a value from YAML or the command line to the option's type. Raises ConfigError if it cannot.

    Of two types, "auto" or a number, say, the words of the first come before the second.
    """
    if get_origin(kind) is Union:
        words, other = get_args(kind)
        return value if value in get_args(words) else convert(name, value, other)
    if get_origin(kind) is Literal:
        return _choice(name, value, get_args(kind))
    if kind is bool:
        return _choice(name, str(value).lower(), ("true", "false")) == "true"
    if kind is int:
        return _whole(name, value)
    if get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(_number(name, item) for item in (items if isinstance(items, list | tuple) else [items]))
    return str(value) if kind is str else _number(name, value)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ConfigError(
            name, f"{value!r} is not one of the allowed values", fix=f"use {' or '.join(map(str, choices))}"
        )
    return value


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not number.is_integer():
        raise ConfigError(name, f"{value!r} is not a whole number", fix="write a whole number")
    if abs(number) > _LARGEST_WHOLE:
        raise ConfigError(name, f"{number:g} is beyond {_LARGEST_WHOLE:g}", fix="write a smaller number")
    return int(number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool):
        raise ConfigError(name, f"{value!r} is not a number", fix="write a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(name, f"{value!r} is not a number", fix="write a number") from None
