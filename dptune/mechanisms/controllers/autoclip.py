"""The "AutoClip" that RLDP's paper describes: the p-th quantile of the batch's raw norms. A LEAK.

One record moves the quantile, and with it every other record's factor and the noise itself, by an amount that nothing
bounds. It is here for comparison: ``quantile`` and ``dc_sgd_p`` are sound versions, and ``auto_s`` is the method that
the paper cites under that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import Constant, needs_one_radius, total_norms
from dptune.mechanisms.interfaces import Knobs
from dptune.mechanisms.registry import controller, mechanism

if TYPE_CHECKING:
    import torch


@controller("raw_quantile")
@dataclass
class RawQuantile(Constant):
    """LEAK. The radius of a step is the p-th quantile of that step's own gradient norms.

    Attributes:
        target: p, the quantile; the paper does not give it.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    target: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise ConfigError("target", f"{self.target} is not in (0, 1)", fix="use a quantile such as 0.5")

    @property
    def raw_inputs(self) -> tuple[str, ...]:
        """Names of the un-noised statistics that it reads."""
        return ("raw quantile of the batch's gradient norms",)

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError unless the clipper has one radius."""
        needs_one_radius("raw_quantile", initial)

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, tokens: torch.Tensor, knobs: Knobs) -> Knobs:
        """LEAK. Returns the quantile of the norms; the given radius for a batch that is empty or has zero norms."""
        quantile = float(total_norms(norms).quantile(self.target)) if len(norms) else 0.0
        return Knobs((quantile or knobs.radii[0],), knobs.noise_multiplier)


mechanism(
    "autoclip_published",
    controller="raw_quantile",
    clips="the whole gradient to a quantile of this batch's raw norms (as RLDP's paper describes AutoClip)",
    adds="Gaussian noise, that raw radius times multiplier",
    adapts="raw gradient norms",
    costs="all privacy",
    verdict="NOT sound: a raw quantile leaks and nothing bounds its sensitivity",
)
