"""AUTO-S: automatic clipping, which normalises instead of clipping (Bu, Wang, Zha and Karypis 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
