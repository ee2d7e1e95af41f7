"""Noises that are added to a clipped sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dptune.errors import ConfigError
from dptune.privacy.entropy import Entropy, uniform

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Gaussian:
    """Independent normal noise, standard deviation ``noise_multiplier * scale`` in every coordinate of a pair."""

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
        """Noise is drawn and added in float64 and cast once."""
        noisy = []
        for total, scale in zip(sums, scales, strict=True):
            noise = standard_normal(entropy, total.numel(), total.device)
            noisy.append((total.double() + noise_multiplier * scale * noise.view_as(total)).to(total.dtype))
        return noisy


@dataclass(frozen=True)
class NoNoise:
    """Nothing is added; no epsilon is finite."""

    noise_multiplier: float = field(default=0.0, init=False)
    family: str = field(default="none", init=False)

    def add(
        self, sums: list[torch.Tensor], scales: Sequence[float], noise_multiplier: float, entropy: Entropy
    ) -> list[torch.Tensor]:
        """The sums as they are."""
        return sums


def standard_normal(entropy: Entropy, count: int, device: torch.device) -> torch.Tensor:
    """``count`` standard normals in float64, by the inverse distribution function of 53-bit uniforms."""
    import torch

    return torch.special.ndtri(torch.from_numpy(uniform(entropy, count)).to(device))
