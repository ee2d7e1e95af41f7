"""A client's local training, for federated DP-LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.training.checkpointing import checkpointed
from dptune.training.data import Tokens
from dptune.training.losses import model_losses
from dptune.training.per_sample import Block, PairGradients


def local_update(
    model: Any,
    pairs: Sequence[Block],
    tokens: Tokens,
    records: NDArray[np.int64],
    *,
    rows: int,
    steps: int,
    learning_rate: float,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
) -> PairGradients:
    """A client's update before clipping: minus the change of its adapters. The model is left as it was.

    Local SGD without momentum on the mean loss, ``rows`` records a step, in order and from the start again. Private.

    Args:
        records: indices of the client's records, at least one.
        rows: physical batch size; every batch has this shape.
        checkpointing: as ``per_sample_gradients`` has it.

    Returns: one unit, whose loss is that of the first step.
    """
    parameters = [parameter for pair in pairs for parameter in pair.parameters]
    start = [parameter.detach().clone() for parameter in parameters]
    device, first = parameters[0].device, None
    try:
        for step in range(steps):
            chosen = _slice(records, step, rows)
            ids, mask = tokens.batch(chosen, device, height=rows)
            with checkpointed(model, enabled=checkpointing):
                with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                    loss = model_losses(model, ids, mask)[: len(chosen)].mean()
                gradients = torch.autograd.grad(loss, parameters)
            first = loss.detach() if first is None else first
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= learning_rate * gradient
        changes = [before - parameter.detach() for before, parameter in zip(start, parameters, strict=True)]
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, start, strict=True):
                parameter.copy_(before)
    flat = iter(change.flatten().float() for change in changes)
    assert first is not None
    return PairGradients([torch.cat([next(flat) for _ in pair.parameters])[None] for pair in pairs], first[None])


def _slice(records: NDArray[np.int64], step: int, rows: int) -> NDArray[np.int64]:
    """The records of a step: at most ``rows``, starting again after the last record."""
    start = (step * rows) % len(records)
    return records[start : start + rows]
