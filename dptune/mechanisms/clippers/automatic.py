"""Automatic clipping: every gradient is scaled by a function of its norm instead of being cut at a radius.

AUTO-S normalises (Bu, Wang, Zha and Karypis 2023); PSAC, per-sample adaptive clipping, has a non-monotonic weight (Xia
et al., AAAI 2023, arXiv 2212.00328).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import ByNorm, check_positive
from dptune.mechanisms.registry import clipper, mechanism

if TYPE_CHECKING:
    import torch


@clipper("auto_s")
@dataclass(frozen=True)
class AutoS(ByNorm):
    """Scales g to g * R / (||g|| + gamma), of norm below R. With Adam, R does not matter (arXiv 2206.07136).

    Attributes:
        stabiliser: gamma; tiny gradients are amplified by at most R / gamma.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    stabiliser: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("stabiliser", self.stabiliser)

    def factors(self, norms: torch.Tensor, radius: float) -> torch.Tensor:
        """(units,) factors R / (||g|| + gamma), not clamped at 1, so that small gradients grow."""
        return radius / (norms + self.stabiliser)


mechanism(
    "auto_s",
    clipper="auto_s",
    clips="by normalising: g R / (|g| + gamma) (AUTO-S, Bu et al. 2023)",
)


@clipper("psac")
@dataclass(frozen=True)
class Psac(ByNorm):
    """Scales g to C * g / (||g|| + r / (||g|| + r)), of norm strictly below C and increasing in ||g||.

    The noise scales with C. Some public code scales it with the largest weight of the batch, which is private.

    Attributes:
        r: constant in (0, 1) of the weight; tiny gradients pass nearly unscaled, unlike with AUTO-S.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    r: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-12 <= self.r < 1:
            raise ConfigError("r", f"{self.r} is not in [1e-12, 1)", fix="use 0.1 or 0.01")

    def factors(self, norms: torch.Tensor, radius: float) -> torch.Tensor:
        """(units,) factors: C at norm 0, at most C / (2 sqrt(r) - r) at sqrt(r) - r, then falling like C / ||g||."""
        return radius / (norms + self.r / (norms + self.r))


mechanism(
    "psac",
    clipper="psac",
    clips="by a non-monotonic weight of the norm (PSAC, Xia et al. 2023)",
)
