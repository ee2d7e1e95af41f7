"""PSAC: per-sample adaptive clipping with a non-monotonic weight (Xia et al., AAAI 2023, arXiv 2212.00328)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import ByNorm
from dptune.mechanisms.registry import clipper, mechanism

if TYPE_CHECKING:
    import torch


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
