"""A classification head: linear layers that train in full, beside the LoRA pairs, as one more block of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper

from dptune.core.errors import ConfigError

#: The name of a head's block in messages.
HEAD = "head"


@dataclass(frozen=True)
class HeadModules:
    """The linear layers of a head. A clipper treats all of their weights and biases as it does one LoRA pair.

    Attributes:
        name: what messages call it.
        layers: the layers, in model order; each sees one row of states for a record, or one for each of its tokens.
    """

    name: str
    layers: tuple[torch.nn.Linear, ...]

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """Weight (out, in) and, where it has one, bias (out,) of each layer in turn."""
        return tuple(parameter for layer in self.layers for parameter in layer.parameters())

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


def head_of(model: torch.nn.Module) -> HeadModules | None:
    """The head that PEFT trains and saves beside the adapter called default; None where there is none.

    Layers of a head that are not linear are not part of it: ``parameter_groups.trained_blocks`` then refuses the model.
    """
    wrappers = [module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)]
    layers = [
        layer
        for wrapper in wrappers
        if "default" in wrapper.modules_to_save
        for layer in wrapper.modules_to_save["default"].modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    return HeadModules(HEAD, tuple(layers)) if layers else None


def start_head(model: Any, names: tuple[str, ...], seed: int) -> None:
    """Fill a head before training: normal weights of the model's own deviation, biases of zero; by a public seed.

    Args:
        model: a sequence classifier of transformers, without adapters.
        names: names of the modules that are the head.

    Raises: ConfigError for a head with a layer that is not linear, whose per-sample gradients are not supported.
    """
    generator, deviation = torch.Generator().manual_seed(seed), getattr(model.config, "initializer_range", 0.02)
    for name in names:
        module = model.get_submodule(name)
        linear = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
        if sum(p.numel() for p in module.parameters()) != sum(p.numel() for one in linear for p in one.parameters()):
            problem = f"{type(model).__name__} has a head ({name}) with layers that are not linear"
            raise ConfigError("model.source", problem, fix="give a BERT, RoBERTa, DistilBERT, ModernBERT or GPT")
        for layer in linear:
            with torch.no_grad():
                shape = layer.weight.shape
                layer.weight.copy_(deviation * torch.randn(shape, generator=generator))
                if layer.bias is not None:
                    layer.bias.zero_()


def keep_in_float32(head: HeadModules) -> None:
    """Hold a head in float32, whatever dtype the frozen model has: AdamW's steps are lost in fewer digits."""
    for layer in head.layers:
        layer.float()
        layer.register_forward_pre_hook(_in_its_dtype)


def _in_its_dtype(layer: torch.nn.Linear, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0].to(layer.weight.dtype), *inputs[1:])
