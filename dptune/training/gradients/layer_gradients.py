"""Gradients of a model's own weights, layer by layer: each unit's norms, and sums weighted by unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dptune.mechanisms.gradient_interfaces import Gradients
from dptune.training.gradients.gradient_checkpointing import checkpointed
from dptune.training.gradients.parameter_groups import LayerModules
from dptune.training.gradients.per_sample import PairGradients
from dptune.training.losses import counted_tokens, model_losses


def layer_gradients(
    model: Any,
    groups: Sequence[LayerModules],
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    owners: torch.Tensor | None,
    units: int,
    *,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
) -> Gradients:
    """Gradients of each unit's loss by the weights of ``groups``. Private. Arguments as ``per_sample_gradients`` has.

    Args:
        groups: the result of ``layer_groups(model)``.
    """
    weights = [parameter for group in groups for parameter in group.parameters]
    rows, device = torch.arange(len(input_ids), device=input_ids.device), input_ids.device.type
    owners, tokens = rows if owners is None else owners, counted_tokens(mask)
    table, losses, counts = [], [], []
    for unit in range(units):
        own = owners == unit
        with checkpointed(model, enabled=checkpointing):
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                of_rows = model_losses(model, input_ids[own], mask[own])
            found = torch.autograd.grad(of_rows.sum(), weights, allow_unused=True, materialize_grads=True)
        table.append(torch.cat([gradient.flatten().float() for gradient in found]))
        losses.append(of_rows.detach().mean())
        counts.append(tokens[own].sum())
    per_group = torch.stack(table).split([group.size for group in groups], dim=1)
    return PairGradients(per_group, torch.stack(losses), torch.stack(counts))
