"""Names for mechanisms, and how an entry of params.yaml (or ``--set`` options) becomes one.

An entry names its three parts and their options, all in one flat table::

    static: {clipper: flat, noise: gaussian, controller: constant, max_grad_norm: 1.0}

Parts that are left out come from the registered mechanism of the same name. Any combination is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from dptune.errors import ConfigError
from dptune.mechanisms.clipping import Flat, Unclipped
from dptune.mechanisms.control import Constant
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noise import Gaussian, NoNoise

CLIPPERS: dict[str, type] = {"flat": Flat, "none": Unclipped}
NOISES: dict[str, type] = {"gaussian": Gaussian, "none": NoNoise}
CONTROLLERS: dict[str, type] = {"constant": Constant}
_PARTS = {"clipper": CLIPPERS, "noise": NOISES, "controller": CONTROLLERS}

#: One line for each option, shown by the command line.
OPTION_HELP = {
    "noise_multiplier": "standard deviation of the noise over the clip radius (the paper's sigma)",
    "max_grad_norm": "clip radius C of the whole per-unit gradient",
    "pairs": "number of LoRA pairs (A, B); a run takes it from its model",
}


@dataclass(frozen=True)
class Registered:
    """A mechanism that has a name of its own.

    Attributes:
        parts: names of its clipper, noise and controller.
        summary: one line for listings.
        published_accountant: how its paper counts.
    """

    parts: Mapping[str, str]
    summary: str
    published_accountant: str = "gdp_clt"


MECHANISMS: dict[str, Registered] = {
    "static": Registered(
        parts={"clipper": "flat", "noise": "gaussian", "controller": "constant"},
        summary="DP-SGD: clips the whole gradient to one radius, adds Gaussian noise, adapts nothing. Sound.",
    ),
    "nonprivate": Registered(
        parts={"clipper": "none", "noise": "none", "controller": "constant"},
        summary="Plain fine-tuning: clips nothing, adds nothing. No privacy; the ceiling to compare with.",
    ),
}


def build(name: str, entry: Mapping[str, Any]) -> Mechanism:
    """The mechanism that an entry describes.

    Raises: ConfigError naming the part or option that is unknown, missing or out of range.
    """
    parts, options = _resolve(name, entry)
    pairs = _number("pairs", options.pop("pairs", 1))
    if not (pairs >= 1 and pairs.is_integer()):
        raise ConfigError("pairs", f"{pairs} is not a positive whole number", fix="count the LoRA pairs")
    known = {item.name for cls in parts.values() for item in _tunable(cls)}
    for option in options:
        if option not in known:
            choices = ", ".join(sorted(known | {"pairs"}))
            raise ConfigError(option, f"mechanism {name!r} has no such option", fix=f"use one of {choices}")
    built = {part: _make(cls, options) for part, cls in parts.items()}
    registered = MECHANISMS.get(name)
    return Mechanism(
        name=name,
        published_accountant=registered.published_accountant if registered else "gdp_clt",
        pairs=int(pairs),
        **built,
    )


def takes_noise(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the entry's noise has a multiplier to calibrate."""
    return "noise_multiplier" in _required(_resolve(name, entry)[0]["noise"])


def describe_options(name: str) -> list[tuple[str, str, str]]:
    """(option, default or "required", help) of a registered mechanism."""
    parts, _ = _resolve(name, {})
    rows = []
    for cls in parts.values():
        for item in _tunable(cls):
            default = "required" if item.default is MISSING else str(item.default)
            rows.append((item.name, default, OPTION_HELP.get(item.name, "")))
    return [*rows, ("pairs", "1", OPTION_HELP["pairs"])]


def _resolve(name: str, entry: Mapping[str, Any]) -> tuple[dict[str, type], dict[str, Any]]:
    options = dict(entry)
    defaults = MECHANISMS[name].parts if name in MECHANISMS else {}
    parts = {}
    for part, available in _PARTS.items():
        chosen = options.pop(part, defaults.get(part))
        if chosen is None:
            raise ConfigError(
                f"mechanisms.{name}",
                f"is not registered and names no {part}",
                fix=f"use {', '.join(MECHANISMS)}, or add '{part}:' with one of {', '.join(available)}",
            )
        if chosen not in available:
            raise ConfigError(
                f"mechanisms.{name}.{part}",
                f"unknown {part} {chosen!r}",
                fix=f"use one of {', '.join(available)}",
            )
        parts[part] = available[chosen]
    return parts, options


def _make(cls: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Build a part from the options that are its own, and take those out of ``options``."""
    mine = {item.name: _number(item.name, options.pop(item.name)) for item in _tunable(cls) if item.name in options}
    missing = _required(cls) - set(mine)
    if missing:
        name = sorted(missing)[0]
        raise ConfigError(name, "is required", fix=f"give {name}=VALUE, or let it be calibrated")
    return cls(**mine)


def _tunable(cls: Any) -> list[Any]:
    return [item for item in fields(cls) if item.init]


def _required(cls: Any) -> set[str]:
    return {item.name for item in _tunable(cls) if item.default is MISSING}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(name, f"{value!r} is not a number", fix="write a number") from None
