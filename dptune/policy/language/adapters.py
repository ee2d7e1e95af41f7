"""LoRA adapters as one flat vector, the vector that is clipped, noised and released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dptune.training.per_sample import lora_pairs
from dptune.training.stacked import StackedAdapters


@dataclass(frozen=True)
class Factors:
    """Layout of adapters in a flat vector: A and then B of each layer in turn.

    Attributes:
        names: name of each layer in the base model.
        shapes: (rank, inputs, outputs) of each layer's adapter.
        scalings: factor that multiplies each layer's B A.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]
    scalings: tuple[float, ...]

    @classmethod
    def of(cls, peft: Any) -> Factors:
        """Read the layout of a PEFT model's adapters."""
        pairs = lora_pairs(peft)
        return cls(
            tuple(pair.name.removeprefix("base_model.model.") for pair in pairs),
            tuple((pair.down.out_features, pair.down.in_features, pair.up.out_features) for pair in pairs),
            tuple(pair.scaling for pair in pairs),
        )

    @property
    def size(self) -> int:
        """Number of trained parameters, d."""
        return sum(rank * (inputs + outputs) for rank, inputs, outputs in self.shapes)

    def stack(self, vectors: torch.Tensor) -> StackedAdapters:
        """Unpack (N, size) vectors into adapters, each for one row of a batch; differentiable."""
        down, up, start = {}, {}, 0
        for name, (rank, inputs, outputs), scaling in zip(self.names, self.shapes, self.scalings, strict=True):
            middle, end = start + rank * inputs, start + rank * (inputs + outputs)
            down[name] = vectors[:, start:middle].view(-1, rank, inputs)
            up[name] = vectors[:, middle:end].view(-1, outputs, rank) * scaling
            start = end
        return StackedAdapters(down, up)


def flat_adapters(peft: Any) -> torch.Tensor:
    """Copy a PEFT model's adapters into one (size,) float32 vector on the CPU, in the order of ``Factors``."""
    return torch.cat([part.detach().flatten() for pair in lora_pairs(peft) for part in pair.parameters]).float().cpu()


def write_adapters(peft: Any, vector: torch.Tensor) -> None:
    """Write a (size,) vector in the order of ``Factors`` into a PEFT model's adapters."""
    parts = [part for pair in lora_pairs(peft) for part in pair.parameters]
    with torch.no_grad():
        for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))
