"""Layer kinds: which layers' own weights can train, by how each record's gradient follows from what the layer saw."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from transformers.pytorch_utils import Conv1D

from dptune.core.errors import ConfigError

FIELD = "train"
LEAVE_OUT = "leave this layer out: train layers by their names, without it"
#: A layer of no known kind may have so many weights: each row's gradient of them is computed whole.
_MOST_WEIGHTS = 1 << 17


def is_known(layer: nn.Module) -> bool:
    """Whether each record's gradient of the layer's weights is a sum over tokens of products of two vectors."""
    return isinstance(layer, nn.Linear | Conv1D | nn.Embedding)


def check_layer(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose weights' gradients cannot be told apart by record. Reads no data and computes nothing.

    Raises: ConfigError naming the layer.
    """
    if problem := _problem(layer):
        raise ConfigError(FIELD, f"layer {name} ({type(layer).__name__}) {problem}", fix=LEAVE_OUT)


def _problem(layer: Any) -> str:
    """Why the layer is refused; empty if it is not."""
    if isinstance(layer, _NormBase):
        return "normalises over all records of a batch, so that one record changes the others' gradients"
    if isinstance(layer, nn.Embedding):
        if layer.scale_grad_by_freq or layer.max_norm is not None:
            return "scales its gradients or weights by what all records of a batch look up"
        return "has sparse gradients" if layer.sparse else ""
    if is_known(layer):
        return ""
    trained = {name: one for name, one in layer._parameters.items() if one is not None and one.requires_grad}
    named = ", ".join(trained)
    if any(True for child in layer.children() for _ in child.parameters()):
        return f"has weights of its own ({named}) beside the layers in it, and how it uses them is not known"
    needed = [
        one
        for one in inspect.signature(layer.forward).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) != 1:
        return f"computes with its weights ({named}) from {len(needed)} inputs, where one is supported"
    if sum(one.numel() for one in trained.values()) > _MOST_WEIGHTS:
        return f"is of no known kind, and has more than {_MOST_WEIGHTS} weights ({named})"
    return ""
