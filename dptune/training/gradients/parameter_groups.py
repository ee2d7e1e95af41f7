"""Parameter groups: the weights that are clipped and noised together: a LoRA pair, a head, or one layer of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from dptune.core.errors import ConfigError
from dptune.training.gradients.layer_kinds import check_layer, is_known
from dptune.training.models.trained_layers import HeadModules, head_of

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


@dataclass(frozen=True)
class LayerModules:
    """The trained weights of one layer of a model, or of layers that share a weight, such as a tied output layer.

    Attributes:
        name: the layer's name in the model; the names of all layers that share a weight, joined by "+".
        modules: the layers, in model order.
        parameters: the weights that train, each once, in model order.
    """

    name: str
    modules: tuple[torch.nn.Module, ...]
    parameters: tuple[torch.nn.Parameter, ...]

    @property
    def size(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


#: What a clipper calls a pair: a LoRA pair, a classification head, or a layer whose own weights train.
Block = PairModules | HeadModules | LayerModules


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


def layer_groups(model: torch.nn.Module) -> list[LayerModules]:
    """One group for every layer that owns a trainable weight, in model order; layers that share one are one group.

    Every trainable parameter is in exactly one group. A module that only holds another layer's weight, as the heads of
    some models do, is not part of its group.

    Raises: ConfigError naming a layer whose gradients cannot be computed unit by unit, or if nothing trains.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=9, n_positions=8))
    >>> [(group.name, group.size) for group in layer_groups(model)][:3]
    [('transformer.wte+lm_head', 36), ('transformer.wpe', 32), ('transformer.h.0.ln_1', 8)]
    """
    holders: dict[int, list[str]] = {}  # of each parameter, the layers that hold it
    own: dict[str, list[torch.nn.Parameter]] = {}
    for name, module in model.named_modules():
        trained = [one for one in module._parameters.values() if one is not None and one.requires_grad]
        if trained:
            own[name] = trained
        for parameter in trained:
            holders.setdefault(id(parameter), []).append(name)
    for name in list(own):
        shared = all(any(is_known(model.get_submodule(one)) for one in holders[id(each)]) for each in own[name])
        if shared and not is_known(model.get_submodule(name)):
            del own[name]
        else:
            check_layer(name, model.get_submodule(name))
    groups: list[list[str]] = []
    for name, trained in own.items():
        sharing = {holder for parameter in trained for holder in holders[id(parameter)]}
        linked = [group for group in groups if sharing.intersection(group)]
        place = groups.index(linked[0]) if linked else len(groups)
        groups = [group for group in groups if group not in linked]
        groups.insert(place, [*(one for group in linked for one in group), name])
    if not groups:
        raise ConfigError("train", "no weight of the model is left to train", fix="name layers that it has")
    return [_group(model, names, own) for names in groups]


def _group(model: torch.nn.Module, names: Sequence[str], own: Mapping[str, list[torch.nn.Parameter]]) -> LayerModules:
    parameters = {id(parameter): parameter for name in names for parameter in own[name]}
    return LayerModules("+".join(names), tuple(map(model.get_submodule, names)), tuple(parameters.values()))


def _pairs(model: torch.nn.Module) -> list[PairModules]:
    return [
        _pair(name, module)
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
        and any("default" in getattr(module, name) for name in module.adapter_layer_names)
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
