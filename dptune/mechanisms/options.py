"""Options of a part: the fields of its dataclass, with values from params.yaml or ``--set``.

The help of an option is written once, in the docstring of the class; its type and default are the field's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dptune.core.declarations import defaults_of, sentences
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
    mine = own_options(cls, options)
    missing = sorted(name for name, default in option_defaults(cls).items() if default is MISSING and name not in mine)
    if missing:
        raise ConfigError(missing[0], "is required", fix=f"give {missing[0]}=VALUE, or let it be calibrated")
    return cls(**mine)


def own_options(cls: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are a part's own, each converted to its type."""
    kinds = _kinds(cls)
    return {name: convert(name, options[name], kinds[name]) for name in option_names(cls) if name in options}


def option_defaults(cls: Any) -> dict[str, Any]:
    """The default of each option; ``dataclasses.MISSING`` for one that is required."""
    names = option_names(cls)
    return {name: default for name, default in defaults_of(cls).items() if name in names} if names else {}


@cache
def _kinds(cls: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _options(cls: Any) -> list[Any]:
    if not is_dataclass(cls):
        return []
    return [item for item in fields(cls) if item.init and not item.name.startswith("_")]  # "_..." is state


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
