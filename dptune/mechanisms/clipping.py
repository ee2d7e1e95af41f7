"""Clippers. Each states the l2 sensitivity that it guarantees under add/remove of one unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptune.errors import ConfigError
from dptune.mechanisms.mechanism import Gradients

if TYPE_CHECKING:
    import torch

#: Norms, factors and sums are float64; this covers their rounding.
_FLOAT64_MARGIN = 1e-9


@dataclass(frozen=True)
class Flat:
    """One radius for the whole gradient: g * min(1, C / ||g||) (Abadi et al. 2016).

    Guarantee: the sum moves by at most ``max_grad_norm`` in l2, over all pairs together.
    """

    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ConfigError("max_grad_norm", f"{self.max_grad_norm} is not positive", fix="use a radius such as 1.0")

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """One radius."""
        return (self.max_grad_norm,)

    def sensitivity(self, radii: Sequence[float], pairs: int) -> float:
        """1: the noise scale is the sensitivity."""
        return 1.0

    def noise_scales(self, radii: Sequence[float], pairs: int) -> tuple[float, ...]:
        """The radius on every pair."""
        return (radii[0],) * pairs

    def clipped_sum(self, gradients: Gradients, radii: Sequence[float]) -> list[torch.Tensor]:
        """Sum of the clipped gradients, flat float64 per pair."""
        norms = gradients.norms()
        total = norms.square().sum(dim=1, keepdim=True).sqrt()
        factors = (radii[0] * (1 - _FLOAT64_MARGIN) / total.clamp(min=1e-300)).clamp(max=1.0)
        return gradients.weighted_sum(factors.expand_as(norms))


@dataclass(frozen=True)
class Unclipped:
    """No bound: for the non-private mechanism only, where no noise is added."""

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """None."""
        return ()

    def sensitivity(self, radii: Sequence[float], pairs: int) -> float:
        """Infinite: no noise bounds what one unit adds."""
        return math.inf

    def noise_scales(self, radii: Sequence[float], pairs: int) -> tuple[float, ...]:
        """Zero."""
        return (0.0,) * pairs

    def clipped_sum(self, gradients: Gradients, radii: Sequence[float]) -> list[torch.Tensor]:
        """The plain sum."""
        norms = gradients.norms()
        return gradients.weighted_sum(norms.new_ones(norms.shape))
