"""The clipper that AdaCliP and GeoClip share: it clips, and has noise added, in other coordinates.

The coordinates come from past releases (``Knobs.geometry``), so they are public and cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import check_positive
from dptune.mechanisms.gradient_interfaces import Geometry, Gradients
from dptune.mechanisms.interfaces import Clipper, Knobs
from dptune.mechanisms.registry import clipper

if TYPE_CHECKING:
    import torch

#: Relative margin by which radii shrink: the number of rows of a matrix product changes how each row is rounded, so
#: that one unit may change the last bits of another's coordinates.
_MARGIN = 1e-6


@clipper("transformed")
@dataclass(frozen=True)
class Transformed(Clipper):
    """Clips each block of w = geometry.forward(g) to its radius; the noisy sum is mapped back to gradients.

    Guarantee: the blocks over their scales move by at most 1 in l2 when one unit joins or leaves.
    """

    VERSION = 1  # raise it when a change moves a released number: tests/golden

    def initial_radii(self, pairs: int) -> tuple[float, ...]:
        """Returns no radii: the geometry has its own."""
        return ()

    def sensitivity(self, knobs: Knobs, pairs: int) -> float:
        """Returns 1, which every geometry's scales ensure."""
        return 1.0

    def scales(self, knobs: Knobs, pairs: int) -> tuple[float, ...]:
        """Returns the scales of the geometry's blocks."""
        return _geometry(knobs).scales

    def empty(self, zeros: list[torch.Tensor], knobs: Knobs) -> list[torch.Tensor]:
        """Returns zero blocks of the geometry's sizes."""
        import torch

        return self._blocks(torch.cat(zeros)[None], knobs, keep=0)

    def clipped_sum(self, gradients: Gradients, knobs: Knobs) -> list[torch.Tensor]:
        """Sum of the clipped, transformed gradients, one flat vector for each block."""
        return self._blocks(gradients.matrix(), knobs)

    def restore(
        self, blocks: list[torch.Tensor], zeros: list[torch.Tensor], knobs: Knobs, expected_batch_size: float
    ) -> list[torch.Tensor]:
        """Map averaged blocks back to parameters, split into pairs."""
        geometry = _geometry(knobs)
        gradient = geometry.backward([block.double() / expected_batch_size for block in blocks]).float()
        return list(gradient.split([zero.numel() for zero in zeros]))

    def _blocks(self, matrix: torch.Tensor, knobs: Knobs, keep: int | None = None) -> list[torch.Tensor]:
        geometry = _geometry(knobs)
        sums = []
        for block, radius in zip(geometry.forward(matrix), geometry.radii, strict=True):
            block = block[:keep]
            norms = block.norm(dim=1, keepdim=True)
            factors = (radius * (1 - _MARGIN) / norms.clamp(min=1e-300)).clamp(max=1.0)
            # A unit whose coordinates overflow would turn the whole sum into NaN; it adds zero instead.
            bounded = (block * factors).where(norms.isfinite(), 0.0)
            sums.append(bounded.sum(dim=0))
        return sums


def check_estimator(decays: dict[str, float], norms: dict[str, float], floor: float, ceiling: float) -> None:
    """Raise ConfigError unless decays lie in [0, 1], norms are positive and 0 < floor <= 1 <= ceiling."""
    for name, decay in decays.items():
        if not 0 <= decay <= 1:
            raise ConfigError(name, f"{decay} is not in [0, 1]", fix="use a decay such as 0.99")
    for name, norm in norms.items():
        check_positive(name, norm)
    if not (0 < floor <= 1 <= ceiling < math.inf):
        raise ConfigError("floor", f"0 < {floor} <= 1 <= {ceiling} does not hold", fix="see its help")


def _geometry(knobs: Knobs) -> Geometry:
    if knobs.geometry is None:
        raise ConfigError("clipper transformed", "has no coordinates", fix="use controller: adaclip or geoclip")
    return knobs.geometry
