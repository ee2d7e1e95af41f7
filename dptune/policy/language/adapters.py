"""LoRA adapters as one flat vector, which is what is clipped, noised and released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dptune.training.per_sample import lora_pairs
from dptune.training.stacked import StackedAdapters


@dataclass(frozen=True)
class Factors:
    """LoRA adapters as one flat vector, which is clipped, noised and released: A and B of each layer in turn."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]  # rank, inputs, outputs
    scalings: tuple[float, ...]

    @classmethod
    def of(cls, peft: Any) -> Factors:
        """The layout of a PEFT model's adapters."""
        pairs = lora_pairs(peft)
        return cls(
            tuple(pair.name.removeprefix("base_model.model.") for pair in pairs),
            tuple((pair.down.out_features, pair.down.in_features, pair.up.out_features) for pair in pairs),
            tuple(pair.scaling for pair in pairs),
        )

    @property
    def size(self) -> int:
        """d: number of trained parameters."""
        return sum(rank * (inputs + outputs) for rank, inputs, outputs in self.shapes)

    def stacked(self, vectors: torch.Tensor) -> StackedAdapters:
        """(N, size) vectors as adapters that are applied to a row of a batch each; differentiable."""
        down, up, used = {}, {}, 0
        for name, (rank, inputs, outputs), scaling in zip(self.names, self.shapes, self.scalings, strict=True):
            middle, end = used + rank * inputs, used + rank * (inputs + outputs)
            down[name] = vectors[:, used:middle].view(-1, rank, inputs)
            up[name] = vectors[:, middle:end].view(-1, outputs, rank) * scaling
            used = end
        return StackedAdapters(down, up)


def flat_adapters(peft: Any) -> torch.Tensor:
    """(size,) float32 copy of a PEFT model's adapters, in the order of ``Factors``."""
    return torch.cat([part.detach().flatten() for pair in lora_pairs(peft) for part in pair.parameters]).float().cpu()


def write_adapters(peft: Any, vector: torch.Tensor) -> None:
    """Write a vector from ``flat_adapters`` into a model's adapters."""
    parts = [part for pair in lora_pairs(peft) for part in pair.parameters]
    with torch.no_grad():
        for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))
