"""Clippers that scale a unit's whole gradient by one factor, which depends on its norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dptune.core.errors import ConfigError
from dptune.mechanisms.controllers.control import total_norms
from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.mechanisms.interfaces import Clipper, Knobs
from dptune.mechanisms.registry import clipper, mechanism

if TYPE_CHECKING:
    import torch

#: Relative margin by which radii shrink, so that the rounding of float64 norms and sums never exceeds them.
FLOAT64_MARGIN = 1e-9
_SMALLEST = 1e-12
_LARGEST = 1e12


def margin_of(gradients: Gradients) -> float:
    """Relative margin by which radii shrink: that of gradients that name one, else ``FLOAT64_MARGIN``."""
    return max(FLOAT64_MARGIN, getattr(gradients, "margin", FLOAT64_MARGIN))


class PairBlocks(Clipper):
    """The usual shape of a release: one block a pair, no change of coordinates."""

    def empty(self, zeros: list[torch.Tensor], knobs: Knobs) -> list[torch.Tensor]:
        """Returns the zero vector of every pair."""
        return zeros

    def restore(
        self, blocks: list[torch.Tensor], zeros: list[torch.Tensor], knobs: Knobs, expected_batch_size: float
    ) -> list[torch.Tensor]:
        """Divide each block by the expected batch size."""
        import torch

        return list(torch._foreach_div(blocks, expected_batch_size))


@dataclass(frozen=True)
class ByNorm(PairBlocks):
    """A base with one radius R: a unit's gradient g is multiplied by ``factors(||g||, R)``, with ||g|| factor <= R.

    Guarantee: the sum moves by at most R in l2, over all pairs together.

    Attributes:
        max_grad_norm: R, radius of a unit's whole gradient (where it starts, if the controller moves it).
    """

    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_positive("max_grad_norm", self.max_grad_norm)

    def factors(self, norms: torch.Tensor, radius: float) -> torch.Tensor:
        """(units,) factors from (units,) norms."""
        raise NotImplementedError

    @property
    def by_norm_alone(self) -> bool:
        """Returns True, unless a subclass clips or gets its gradients in a way of its own."""
        own = type(self)
        return own.clipped_sum is ByNorm.clipped_sum and own.gradients is Clipper.gradients

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """Returns one radius for the whole gradient."""
        return (self.max_grad_norm,)

    def sensitivity(self, knobs: Knobs, pairs: int) -> float:
        """Returns 1: the noise scale is the sensitivity."""
        return 1.0

    def scales(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        """Returns the radius for every pair."""
        return (knobs.radii[0],) * pairs

    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """Sum of the scaled gradients, flat float64 per pair."""
        norms = gradients.norms()
        factors = self.factors(total_norms(norms), knobs.radii[0]) * (1 - margin_of(gradients))
        return gradients.weighted_sum(factors[:, None].expand_as(norms))


@clipper("flat")
@dataclass(frozen=True)
class Flat(ByNorm):
    """Clips g to g * min(1, C / ||g||) (Abadi et al. 2016)."""

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    def factors(self, norms: torch.Tensor, radius: float) -> torch.Tensor:
        """Shrinks only what exceeds the radius."""
        return (radius / norms.clamp(min=1e-300)).clamp(max=1.0)


mechanism(
    "static",
    clips="the whole gradient to one radius (DP-SGD, Abadi et al. 2016)",
)


@clipper("l1")
@dataclass(frozen=True)
class L1(Flat):
    """Clips g to g * min(1, C / ||g||_1): for Laplace noise and few parameters, as ||g||_1 may be sqrt(d) ||g||_2.

    Guarantee: the sum moves by at most C in l1, and so in l2.

    Attributes:
        max_grad_norm: C, l1 radius of a unit's whole gradient.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    norm: ClassVar[str] = "l1"

    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """Sum of the scaled gradients, flat float64 per pair."""
        norms = gradients.norms()
        factors = self.factors(gradients.matrix().abs().sum(dim=1), knobs.radii[0]) * (1 - FLOAT64_MARGIN)
        return gradients.weighted_sum(factors[:, None].expand_as(norms))


@clipper("none")
@dataclass(frozen=True)
class Unclipped(PairBlocks):
    """Leaves gradients as they are: for the non-private mechanism only, which adds no noise."""

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    @property
    def by_norm_alone(self) -> bool:
        """Returns True: every factor is 1."""
        return True

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """Returns no radii: nothing is clipped."""
        return ()

    def sensitivity(self, knobs: Knobs, pairs: int) -> float:
        """Returns infinity: nothing bounds what one unit adds."""
        return math.inf

    def scales(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        """Returns zeros: no block gets noise."""
        return (0.0,) * pairs

    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """Sum of the gradients as they are, flat float64 per pair."""
        norms = gradients.norms()
        return gradients.weighted_sum(norms.new_ones(norms.shape))


mechanism(
    "nonprivate",
    clipper="none",
    noise="none",
    clips="nothing",
    adds="nothing",
    costs="all privacy",
    verdict="Not private: plain fine-tuning, the ceiling to compare with",
)


def check_positive(name: str, value: float) -> None:
    """Raise ConfigError unless ``value`` is a positive number, and not so small that its rounding shows."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(name, f"{value} is not positive", fix="use a number such as 1.0")
    if value > _LARGEST:
        raise ConfigError(
            name,
            f"{value} is beyond {_LARGEST:g}, the largest value for which float32 keeps enough range",
            fix="use 1.0, say",
        )
    if value < _SMALLEST:
        raise ConfigError(name, f"{value} is below {_SMALLEST}", fix="use a number such as 1.0")
