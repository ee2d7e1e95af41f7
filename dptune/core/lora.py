"""LoRA hyper-parameters of the adapters. No torch, so that settings can be checked without it.

Example:
    >>> Lora(rank=4).alpha
    16
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Len, Lt, MinLen

from dptune.core.bounds import Few, Rank
from dptune.core.declarations import check
from dptune.core.errors import ConfigError, first_line

_Layer = Annotated[str, Len(1, 200)]
Dropout = Annotated[float, Ge(0), Lt(1)]
#: Starts that read no record and leave the frozen weights alone; True is PEFT's default, B = 0.
STARTS = (True, "gaussian", "orthogonal")
#: Why PEFT's other starts are refused, by the first word of their name.
_REFUSED_STARTS = {
    **dict.fromkeys(("eva", "corda", "lora_ga"), "reads records, which no epsilon would cover"),
    **dict.fromkeys(("pissa", "olora", "loftq"), "changes the frozen weights, which runs share and adapters rely on"),
    "mica": "freezes the other factor, whose gradients are not supported",
}


@dataclass(frozen=True)
class Lora:
    """Hyper-parameters of the LoRA adapters, each with PEFT's meaning.

    Attributes:
        rank: LoRA rank: inner size of the two factors whose product updates a layer.
        alpha: LoRA scaling: updates are multiplied by alpha / rank.
        dropout: share of the adapters' inputs that is dropped in training.
        target_modules: linear layers to adapt: names, each the end of a whole name; a regular expression of whole
            names; or "all-linear" for all but the output layer. Left out, PEFT's choice for the model's family.
        rslora: scale updates by alpha / sqrt(rank) in place of alpha / rank.
        rank_pattern: rank of the layers whose name ends in, or matches, the key.
        alpha_pattern: alpha of the layers whose name ends in, or matches, the key.
        init_lora_weights: start of the adapters: true for PEFT's default, "gaussian" or "orthogonal".
    """

    rank: Rank = 8
    alpha: Few = 16
    dropout: Dropout = 0.05
    target_modules: Annotated[tuple[_Layer, ...], MinLen(1)] | Annotated[str, Len(1, 1000)] | None = None
    rslora: bool = False
    rank_pattern: Mapping[str, Rank] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Few] = field(default_factory=dict)
    init_lora_weights: Literal[True] | str = True  # checked below, where each refusal has its reason

    def __post_init__(self) -> None:
        """Raises: ConfigError for a value out of bounds, a start that is refused, and a pattern without numbers."""
        _check_start(self.init_lora_weights)
        check(self, "lora." if type(self) is Lora else "")
        _check_targets(self.target_modules)
        for name in ("rank_pattern", "alpha_pattern"):
            _check_pattern(f"lora.{name}", getattr(self, name))
        for rank in (self.rank, *self.rank_pattern.values()):
            if self.init_lora_weights == "orthogonal" and rank % 2:
                raise ConfigError("lora.init_lora_weights", f"orthogonal needs even ranks, not {rank}", fix="change it")


def _check_start(start: object) -> None:
    if start is True or (isinstance(start, str) and start in STARTS):
        return
    reason = next((why for name, why in _REFUSED_STARTS.items() if str(start).startswith(name)), "is unknown")
    if start is False:
        reason = "starts from random adapters, which move the model before it learned anything"
    raise ConfigError("lora.init_lora_weights", f"{start!r} {reason}", fix="use true, gaussian or orthogonal")


def _check_targets(targets: object) -> None:
    """Raise ConfigError for an empty value, which would count as left out, and for what is no text or list of texts."""
    names = targets if isinstance(targets, list | tuple) else (targets,)
    if targets is not None and not (names and all(isinstance(name, str) and name for name in names)):
        fix = 'name layers, such as ("q_proj", "v_proj"); or leave it out'
        raise ConfigError("lora.target_modules", f"{targets!r} names no layers", fix=fix)


def _check_pattern(field: str, pattern: object) -> None:
    """Raise ConfigError unless a pattern maps names, which are regular expressions, to positive whole numbers."""
    if not isinstance(pattern, Mapping):
        raise ConfigError(field, f"{pattern!r} is not a mapping", fix="map names of layers to numbers: {q_proj: 4}")
    for key, value in pattern.items():
        if not (isinstance(value, int) and not isinstance(value, bool) and value > 0):
            raise ConfigError(field, f"{key}: {value!r} is not a positive whole number", fix="give one, such as 4")
        try:
            re.compile(key)
        except (re.error, TypeError) as error:
            raise ConfigError(
                field, f"{key!r} is not the name of a layer ({first_line(error)})", fix="mend it"
            ) from None
