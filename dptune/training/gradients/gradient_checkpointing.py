"""Gradient checkpointing: a transformer layer keeps its input alone, and runs again when the rest is needed.

transformers' own switch works in training mode only, in which a frozen model's dropout would draw masks over the whole
batch. So layers are wrapped here, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dptune.core.errors import ConfigError


@contextmanager
def checkpointed(model: torch.nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """Context in which the model's transformer layers are checkpointed, unless ``enabled`` is False.

    The backward pass must run inside it too.

    Raises: ConfigError for a model whose layers transformers does not mark for it.
    """
    layers = layers_of(model) if enabled else []
    own = [vars(layer).get("forward") for layer in layers]  # what hooks and patches put in the class's place
    try:
        for layer in layers:
            layer.forward = partial(_run, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The layers that can be checkpointed. Raises: ConfigError if there are none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        named = getattr(model, "get_base_model", lambda: model)()
        problem = f"transformers marks no layers of {type(named).__name__} for it"
        fix = "leave it off, and lower training.physical_batch_size (in tune: rows)"
        raise ConfigError("training.gradient_checkpointing", problem, fix=fix)
    return list(layers)


def _run(forward: Any, *inputs: Any, **named: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, **named)
