"""Gradients as mechanisms see them: what a clipper may ask of a batch, and of its own geometry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Gradients(Protocol):
    """Gradients of the units in one physical micro-batch. Finite: a unit whose gradient was not is all zeros."""

    def norms(self) -> torch.Tensor:
        """(units, pairs) float64: l2 norm of each unit's gradient of each pair, A and B jointly."""
        ...

    def losses(self) -> torch.Tensor:
        """(units,) float64, finite: mean loss of each unit's records."""
        ...

    def tokens(self) -> torch.Tensor:
        """(units,) float64: number of tokens that count in each unit's loss, over all its records."""
        ...

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """Per pair, the flat vector sum_u factors[u, pair] * gradient[u, pair]; float64, but float32 of layers."""
        ...

    def matrix(self) -> torch.Tensor:
        """(units, parameters) float64: every unit's whole gradient, pair after pair. ConfigError where none is held."""
        ...


class GradientSource(Protocol):
    """The gradients of one Poisson batch, computed in the way that the clipper chooses. Private.

    Each unit is in exactly one micro-batch.
    """

    def of_losses(self) -> Iterator[Gradients]:
        """Every unit's gradient of the sum of its records' mean token losses, at the current weights."""
        ...

    def of_local_training(self, steps: int, learning_rate: float) -> Iterator[Gradients]:
        """Every unit's own update: minus the change of the adapters after ``steps`` SGD steps on its records alone."""
        ...


class Geometry(Protocol):
    """A public change of coordinates, made from past releases, in which gradients are clipped and noised."""

    @property
    def radii(self) -> tuple[float, ...]:
        """Clip radius of each block."""
        ...

    @property
    def scales(self) -> tuple[float, ...]:
        """Noise of each block at noise multiplier 1; the squared ratios radius / scale sum to 1."""
        ...

    def forward(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Map (units, parameters) to one (units, size) matrix for each block."""
        ...

    def backward(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Map averaged noisy blocks to a (parameters,) gradient: the inverse of ``forward``."""
        ...


@dataclass(frozen=True)
class Federation:
    """The clients of a clipper that bounds what a whole client sends. They are the units of privacy. Public.

    Attributes:
        clients: how many there are; records (whole units) are dealt out to them.
        clients_per_round: expected number in a step.
    """

    clients: int
    clients_per_round: float
