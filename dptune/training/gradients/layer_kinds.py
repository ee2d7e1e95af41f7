"""Layer kinds: which layers' own weights can train, and how each record's gradient follows from what the layer saw.

Of a layer's input and its output's gradient, both by record and token:

- linear layers, GPT-2's ``Conv1D`` (whose weight is transposed) and embeddings have gradients that are sums of outer
  products (``outer_products``);
- biases, layer norms and other layers with few weights have each row's gradient computed whole, in one small table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from dptune.core.errors import ConfigError
from dptune.training.gradients.double_precision import Float64
from dptune.training.gradients.outer_products import Products

FIELD = "train"
LEAVE_OUT = "leave this layer out: train layers by their names, without it"
#: A layer of no known kind may have so many weights: each row's gradient of them is computed whole.
_MOST_WEIGHTS = 1 << 17


def is_known(layer: nn.Module) -> bool:
    """Whether each record's gradient of the layer's weight is a sum over tokens of products of two vectors."""
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
    trained = trained_weights(layer)
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


def trained_weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The layer's own weights that train, without those of layers in it, by name."""
    return {name: one for name, one in layer._parameters.items() if one is not None and one.requires_grad}


def gradient_parts(
    layer: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype
) -> dict[str, Products | torch.Tensor]:
    """Each row's gradient of each of the layer's weights that trains.

    Args:
        inputs: (rows, ..., width) what the layer read; (rows, tokens) row numbers of an embedding.
        gradient: (rows, ..., width) the gradient of its output, or of an embedding's looked-up rows.
        dtype: of the tables.

    Returns: by the weight's name, outer products or a (rows, entries) table.
    """
    trained, parts = trained_weights(layer), dict[str, Products | torch.Tensor]()
    if isinstance(layer, nn.Embedding):
        if layer.padding_idx is not None:  # torch gives that row no gradient, and here no unit may have one
            gradient = gradient.masked_fill((inputs == layer.padding_idx)[..., None], 0.0)
        return {"weight": Products(inputs.flatten(1), _by_token(gradient))}
    is_norm = type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1
    if not (is_known(layer) or is_norm):
        return _tables(layer, trained, inputs, gradient, dtype)
    inputs, gradient = _by_token(inputs), _by_token(gradient)
    if "weight" in trained and type(layer) is nn.LayerNorm:
        seen = nn.functional.layer_norm(inputs.to(dtype), layer.normalized_shape, eps=layer.eps)
        parts["weight"] = (seen * gradient).sum(dim=1, dtype=dtype)
    elif "weight" in trained:
        swapped = isinstance(layer, Conv1D)  # its weight is (width in, width out)
        parts["weight"] = Products(inputs, gradient) if swapped else Products(gradient, inputs)
    if "bias" in trained:
        parts["bias"] = gradient.sum(dim=1, dtype=dtype)
    return parts


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """(rows, all positions, width)."""
    return states[:, None] if states.dim() == 2 else states.flatten(1, -2)


def _tables(
    layer: nn.Module, trained: dict[str, nn.Parameter], inputs: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype
) -> dict[str, Products | torch.Tensor]:
    """Each row's gradient of all weights of a layer of any kind, which is run again on each row by itself."""
    weights = {name: one.detach() for name, one in trained.items()}

    def of_row(row: torch.Tensor, back: torch.Tensor) -> dict[str, torch.Tensor]:
        pull: Any = vjp(lambda given: functional_call(layer, given, (row[None],)), weights)[1]
        found: dict[str, torch.Tensor] = pull(back[None])[0]
        return found

    # A backward pass forgets the mode that the forward pass ran in.
    with Float64() if dtype == torch.float64 else nullcontext():
        found = vmap(of_row)(inputs, gradient)
    return {name: table.flatten(1).to(dtype) for name, table in found.items()}


@contextmanager
def lookups(layer: nn.Embedding, tap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Context in which what an embedding looks up is tapped, with the row numbers that its own code computes."""
    own: Any = layer  # whose forward functions are set for a while
    forward, before = layer.forward, vars(layer).get("forward")

    def run(*args: Any, **named: Any) -> Any:
        with _Lookups(layer.weight, tap):
            return forward(*args, **named)

    own.forward = run
    try:
        yield
    finally:
        vars(layer).pop("forward", None)
        if before is not None:
            own.forward = before


class _Lookups(TorchFunctionMode):
    """Taps ``torch.nn.functional.embedding``: some embeddings shift the numbers, or scale what they looked up."""

    def __init__(self, weight: torch.Tensor, tap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._weight, self._tap = weight, tap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and tap it if it looks up rows of the weight."""
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.embedding and len(args) > 1 and args[1] is self._weight:
            return self._tap(args[0], output)
        return output
