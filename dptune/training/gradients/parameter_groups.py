"""Parameter groups: the weights that are clipped and noised together, a LoRA pair or a layer of a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from dptune.core.errors import ConfigError
from dptune.training.models.head import HeadModules, head_of

#: PEFT's LoRA on a linear layer, in any bits: an update of B A added to its output, and nothing else.
_PLAIN = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit")


_FIELD = "lora.target_modules"


@dataclass(frozen=True)
class PairModules:
    """A LoRA pair: its name in the model, its two linear layers, and the scaling and dropout of their product."""

    name: str
    down: torch.nn.Linear  # lora_A: width -> rank
    up: torch.nn.Linear  # lora_B: rank -> width
    scaling: float = 1.0
    dropout: float = 0.0

    @property
    def layers(self) -> tuple[torch.nn.Linear, ...]:
        """A then B, the order in which a pair's flat vector holds them; without A where it is frozen."""
        return (self.down, self.up) if self.down.weight.requires_grad else (self.up,)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The weights of ``layers``."""
        return tuple(layer.weight for layer in self.layers)

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


#: What a clipper calls a pair: a LoRA pair, or a classification head.
Block = PairModules | HeadModules


def lora_pairs(model: torch.nn.Module) -> list[PairModules]:
    """Every LoRA pair, in model order.

    Raises: ConfigError if there is none, if an adapter is not two plain linear layers (of an embedding, AdaLoRA, aLoRA,
        DoRA), or if some trainable parameter belongs to no pair (it would train without privacy).
    """
    pairs = _pairs(model)
    _check_covered(model, pairs)
    return pairs


def trained_blocks(model: torch.nn.Module) -> list[Block]:
    """Every LoRA pair, in model order, and then the model's head if it has one.

    Raises: ConfigError as ``lora_pairs``, for a trainable parameter that is in no pair and not in the head.
    """
    pairs, head = _pairs(model), head_of(model)
    blocks: list[Block] = [*pairs, *([head] if head else [])]
    _check_covered(model, blocks)
    return blocks


def _pairs(model: torch.nn.Module) -> list[PairModules]:
    return [
        _pair(name, module)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and _has_default(module)
    ]


def _check_covered(model: torch.nn.Module, blocks: Sequence[Block]) -> None:
    parameters = [parameter for block in blocks for parameter in block.parameters]
    covered = {id(parameter) for parameter in parameters}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            problem = f"trainable parameter {name} is in no LoRA pair, so its gradient would not be privatised"
            raise ConfigError("lora", problem, fix="freeze it, or use plain LoRA on linear layers")
    if not any(isinstance(block, PairModules) for block in blocks):
        raise ConfigError("lora", "the model has no adapter called default", fix="attach one with attach_lora")
    if len(covered) != len(parameters):
        raise ConfigError(_FIELD, "two LoRA pairs share a parameter", fix="leave one of these layers out")


def _has_default(module: LoraLayer) -> bool:
    return any("default" in getattr(module, name) for name in module.adapter_layer_names)


def _pair(name: str, module: Any) -> PairModules:
    """The pair of an adapted layer.

    Other kinds of adapter select tokens, scale, or have no two linear layers: their gradients are other sums.
    """
    variant = type(module.lora_variant.get("default") or module)
    kind = f"{variant.__module__}.{variant.__name__}"
    is_plain = kind in _PLAIN and module.lora_A["default"].bias is None and module.lora_B["default"].bias is None
    if not is_plain:
        problem = f"layer {name} has an adapter ({kind}) whose gradients are not supported"
        raise ConfigError(_FIELD, problem, fix="use plain LoRA, and name linear layers only (no embedding)")
    if module.merged:
        raise ConfigError("lora", f"the adapter of layer {name} is merged into it", fix="call unmerge_adapter() first")
    return PairModules(
        name,
        module.lora_A["default"],
        module.lora_B["default"],
        module.scaling["default"],
        getattr(module.lora_dropout["default"], "p", 0.0),
    )
