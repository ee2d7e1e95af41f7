"""Noises that are added to a clipped sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dptune.errors import ConfigError
from dptune.privacy.entropy import Entropy, signed_tail

if TYPE_CHECKING:
    import torch


#: Outputs lie on multiples of this share of the standard deviation. Machine noise is itself a lattice of
#: doubles; without a coarser public grid the low bits of noise + sum tell on which sum the lattice was shifted
#: (Mironov 2012, for Laplace). The grid costs nothing: rounding is post-processing of the ideal mechanism.
_GRID = 2.0**-20


@dataclass(frozen=True)
class Gaussian:
    """Independent normal noise, standard deviation ``noise_multiplier * scale`` in every coordinate of a block.

    Attributes:
        noise_multiplier: standard deviation of the noise over the clip radius (the paper's sigma).
    """

    noise_multiplier: float
    family: str = field(default="gaussian", init=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise ConfigError(
                "noise_multiplier",
                f"{self.noise_multiplier} is not positive",
                fix="calibrate it, or use nonprivate",
            )

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """Added in float64, rounded to a public grid, then cast: see ``_GRID``."""
        sizes = [total.numel() for total in sums]
        normals = standard_normal(entropy, sum(sizes), sums[0].device).split(sizes)  # one draw: calls cost more
        noisy = []
        for total, scale, normal in zip(sums, scales, normals, strict=True):
            deviation = noise_multiplier * scale
            value = total.double() + deviation * normal
            step = deviation * _GRID
            noisy.append(((value / step).round() * step).float())
        return noisy


@dataclass(frozen=True)
class NoNoise:
    """Nothing is added; no epsilon is finite."""

    noise_multiplier: float = field(default=0.0, init=False)
    family: str = field(default="none", init=False)

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """The sums as they are, in float32."""
        return [total.float() for total in sums]


def standard_normal(entropy: Entropy, count: int, device: torch.device) -> torch.Tensor:
    """``count`` standard normals in float64, by the inverse distribution function, fine into the tails."""
    import torch

    signs, tail = (torch.from_numpy(values).to(device) for values in signed_tail(entropy, count))
    return -signs * torch.special.ndtri(tail)
