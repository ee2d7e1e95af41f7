"""All LoRA adapters of an ensemble as one tensor a layer, applied in one forward pass over the frozen base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dptune.core.errors import ConfigError
from dptune.training.gradients.per_sample import by_row

#: The row index of the public model: the last entry of every stack, which is zero.
PUBLIC = -1


@dataclass(frozen=True)
class StackedAdapters:
    """Adapters of N models and, last, a zero adapter for the public model.

    Attributes:
        down: the A factors by module name, each (N + 1, rank, inputs).
        up: the B factors by module name, each (N + 1, outputs, rank), with the LoRA scaling included.
    """

    down: Mapping[str, torch.Tensor] = field(repr=False)
    up: Mapping[str, torch.Tensor] = field(repr=False)

    @classmethod
    def of(
        cls, adapters: Sequence[Mapping[str, torch.Tensor]], scaling: float, device: torch.device
    ) -> StackedAdapters:
        """Stack PEFT state dicts, whose keys end in ``lora_A.weight`` and ``lora_B.weight``.

        Raises: ConfigError if there are none, or they are not of one shape.
        """
        if not adapters:
            raise ConfigError("ensemble", "holds no adapter", fix="tune its shards first")
        shapes = {key: value.shape for key, value in adapters[0].items()}
        for number, adapter in enumerate(adapters):
            if {key: value.shape for key, value in adapter.items()} != shapes:
                problem = f"shard {number} has other layers, rank or sizes than shard 0"
                raise ConfigError("ensemble", problem, fix="tune all shards on one base with one LoRA configuration")

        def stack(ending: str, factor: float) -> dict[str, torch.Tensor]:
            stacks = {}
            for key in (key for key in shapes if key.endswith(ending)):
                parts = [adapter[key].float() * factor for adapter in adapters]
                name = key.removesuffix(ending).removeprefix("base_model.model.")
                stacks[name] = torch.stack([*parts, torch.zeros_like(parts[0])]).to(device)
            return stacks

        return cls(stack(".lora_A.weight", 1.0), stack(".lora_B.weight", scaling))

    def __len__(self) -> int:
        """The number of models, without the public one."""
        return len(next(iter(self.down.values()))) - 1

    @contextmanager
    def apply(self, model: Any, rows: torch.Tensor) -> Iterator[None]:
        """Context in which row j of every batch passes through adapter ``rows[j]``, or through none for ``PUBLIC``.

        Time does not depend on which adapters are chosen.
        """
        modules = dict(model.named_modules())
        missing = [name for name in self.down if name not in modules]
        if missing:
            raise ConfigError("ensemble", f"the base has no layer {missing[0]}", fix="use the base it was tuned on")
        hooks = [modules[name].register_forward_hook(self._hook(name, rows)) for name in self.down]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, rows: torch.Tensor) -> Any:
        down, up = self.down[name][rows], self.up[name][rows]

        def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            low = torch.bmm(by_row(inputs[0], len(rows), -1, name).to(down.dtype), down.mT)
            return output + torch.bmm(low, up.mT).to(output.dtype).view_as(output)

        return add
