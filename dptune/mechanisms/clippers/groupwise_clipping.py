"""Group-wise clipping: one radius a LoRA pair (McMahan et al. 2018; He et al. 2023; RLDP equation 4).

One unit moves pair i by at most C_i, so with noise s_i on it the joint multiplier is
z = (sum_i (C_i / s_i)^2)^(-1/2). Noise s_i = z C_i / w_i has joint multiplier z for any weights w_i with
sum w_i^2 = 1. RLDP's equation 6 has s_i = sigma C_i, so its z is sigma / sqrt(pairs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import PairBlocks, check_positive, margin_of
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Clipper, Knobs
from dptune.mechanisms.registry import clipper, mechanism

if TYPE_CHECKING:
    import torch


@clipper("per_pair")
@dataclass(frozen=True)
class PerPair(PairBlocks):
    """Clips pair i of each unit to C_i, A and B jointly.

    Guarantee: in units of ``scales`` the joint sensitivity is 1, or sqrt(pairs) where ``noise_unit`` is "pair".

    Attributes:
        max_grad_norm: C; every pair starts at C / sqrt(pairs), so that the whole stays within C.
        pair_radius: starting radius of every pair; 0 derives it from ``max_grad_norm``.
        allocation: "equal" gives every pair the same share of the budget, "global" the same noise.
        weights: w_i in place of the allocation, scaled to sum of squares 1.
        noise_unit: "joint" counts the noise multiplier over all pairs together, "pair" as RLDP does: the noise
            on one pair over its radius, with equal weights.
        stabiliser: constant added to norms before dividing; RLDP has 1e-6.
        freeze_down: train only the B factors (FFA-LoRA), so that B A has no product of two noises.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    max_grad_norm: float = 1.0
    pair_radius: float = 0.0
    allocation: Literal["equal", "global"] = "equal"
    weights: tuple[float, ...] = ()
    noise_unit: Literal["joint", "pair"] = "joint"
    stabiliser: float = 0.0
    freeze_down: bool = False

    def __post_init__(self) -> None:
        check_positive("max_grad_norm", self.max_grad_norm)
        if not (math.isfinite(self.pair_radius) and self.pair_radius >= 0):
            raise ConfigError("pair_radius", f"{self.pair_radius} is negative", fix="use 0.1, or 0 for max_grad_norm")
        if not (math.isfinite(self.stabiliser) and self.stabiliser >= 0):
            raise ConfigError("stabiliser", f"{self.stabiliser} is negative", fix="use 0 or 1e-6")
        if any(not (math.isfinite(weight) and weight > 0) for weight in self.weights):
            raise ConfigError("weights", "are not all positive", fix="give one positive number a pair")

    @property
    def by_norm_alone(self) -> bool:
        """Returns True, unless a subclass clips in a way of its own, or A factors are to be frozen.

        Layers of a model take the place of pairs, with the same bound: one unit moves the sum of layer i by C_i.
        """
        own = type(self)
        is_plain = own.clipped_sum is PerPair.clipped_sum and own.gradients is Clipper.gradients
        return is_plain and not self.freeze_down

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """Returns one radius for each pair."""
        return (self.pair_radius or self.max_grad_norm / math.sqrt(pairs),) * pairs

    def sensitivity(self, knobs: Knobs, pairs: int) -> float:
        """Returns sqrt(pairs) if ``noise_unit`` is "pair", else 1; exact for any radii and weights."""
        return math.sqrt(pairs) if self.noise_unit == "pair" else 1.0

    def scales(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        """Returns C_i / w_i, divided by the joint sensitivity."""
        weights = self._weights(knobs, pairs)
        joint = self.sensitivity(knobs, pairs)
        return tuple(radius / (weight * joint) for radius, weight in zip(knobs.radii, weights, strict=True))

    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """Sum of the gradients with every pair clipped to its own radius, flat float64 per pair."""
        norms = gradients.norms()
        radii = norms.new_tensor(knobs.radii) * (1 - margin_of(gradients))
        return gradients.weighted_sum((radii / (norms + self.stabiliser).clamp(min=1e-300)).clamp(max=1.0))

    def _weights(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        weights = knobs.weights or self.weights
        if not weights:
            weights = knobs.radii if self.allocation == "global" else (1.0,) * pairs
        if len(weights) != pairs:
            raise ConfigError("weights", f"are {len(weights)} for {pairs} pairs", fix="give one a pair")
        return normalised(weights)


mechanism(
    "dp_lora",
    clipper="per_pair",
    options={"allocation": "global"},
    clips="each LoRA pair to the same radius C / sqrt(pairs)",
    adds="the same Gaussian noise everywhere, C times multiplier; freeze_down=true trains B alone (FFA-LoRA)",
)


mechanism(
    "per_pair",
    clipper="per_pair",
    clips="each LoRA pair to its own radius (McMahan et al. 2018, He et al. 2023)",
    adds="Gaussian noise on each pair, radius over weight times multiplier",
)


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Scale weights to a sum of squares of 1."""
    norm = math.hypot(*weights)
    return tuple(weight / norm for weight in weights)
