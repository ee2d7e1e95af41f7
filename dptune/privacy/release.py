"""A release is data: everything an accountant must know about one step that touched private records.

The mechanism makes it, the ledger stores it, accountants interpret it; the three never mix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dptune.errors import ConfigError

#: How often each distinct release happened. Order does not matter to any accountant here.
Composition = Counter["Release"]

NOISES = ("gaussian", "none")


@dataclass(frozen=True)
class Release:
    """One noisy sum over a Poisson sample, add/remove adjacency, one unit of privacy = one sampled element.

    Attributes:
        sample_rate: probability q in (0, 1] with which each unit enters the batch, independently.
        noise_multiplier: standard deviation of the noise in the mechanism's own normalised units,
            the number that its paper gives to an accountant. 0 only with noise "none".
        sensitivity: l2 sensitivity of the *whole* released vector in those same units; 1 when the
            paper's number is right, sqrt(n) when n groups are noised as if each were alone.
        noise: family of the noise, one of ``NOISES``.
        statistics: names of what left the step, all covered by this one noise.
        raw_inputs: names of un-noised private statistics that steered the step or left it. Leaks.
        adaptive: True when q or the noise multiplier was chosen from earlier releases, which only a
            privacy filter fixed in advance can account for.
    """

    sample_rate: float
    noise_multiplier: float
    sensitivity: float = 1.0
    noise: str = "gaussian"
    statistics: tuple[str, ...] = ("gradient sum",)
    raw_inputs: tuple[str, ...] = ()
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_rate <= 1.0:
            raise ConfigError("sample_rate", f"{self.sample_rate} is not in (0, 1]", fix="use batch / records")
        if self.noise not in NOISES:
            raise ConfigError("noise", f"unknown family {self.noise!r}", fix=f"use one of {', '.join(NOISES)}")
        if not (math.isfinite(self.sensitivity) and self.sensitivity > 0):
            raise ConfigError("sensitivity", f"{self.sensitivity} is not a positive number", fix="give the l2 bound")
        noisy = self.noise != "none"
        if not (math.isfinite(self.noise_multiplier) and (self.noise_multiplier > 0) == noisy):
            raise ConfigError(
                "noise_multiplier",
                f"{self.noise_multiplier} does not fit noise {self.noise!r}",
                fix="use a positive number with noise, 0 without",
            )

    @property
    def effective_noise_multiplier(self) -> float:
        """Noise per unit of the true joint sensitivity: what a sound accountant takes."""
        return self.noise_multiplier / self.sensitivity

    @property
    def leaks(self) -> tuple[str, ...]:
        """Why this release has no finite epsilon, empty if it has one."""
        return (*self.raw_inputs, *(() if self.noise != "none" else ("gradients without noise",)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; ``from_dict`` gives back an equal release."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Release:
        """Raises ConfigError for missing or unknown keys and for values of the wrong type or range."""
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            raise ConfigError("release", f"keys {sorted(set(data) ^ known)} missing or unknown", fix="use to_dict's")
        for key in ("sample_rate", "noise_multiplier", "sensitivity"):
            if isinstance(data[key], bool) or not isinstance(data[key], int | float):
                raise ConfigError(key, f"{data[key]!r} is not a number", fix="write a number")
        for key in ("statistics", "raw_inputs"):
            if not isinstance(data[key], list) or not all(isinstance(item, str) for item in data[key]):
                raise ConfigError(key, f"{data[key]!r} is not a list of names", fix="write a list")
        if not isinstance(data["adaptive"], bool):
            raise ConfigError("adaptive", f"{data['adaptive']!r} is not true or false", fix="write true or false")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return cls(**values)
