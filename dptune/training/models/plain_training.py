"""Plain training, without privacy: of public models, and of models that only answer through a protocol."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dptune.core.progress import progress
from dptune.training.data import Tokens
from dptune.training.losses import model_losses


def fit(
    model: Any,
    tokens: Tokens,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    description: str,
    losses: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = model_losses,
    autocast: torch.dtype | None = None,
    schedule: str = "one_cycle",
) -> None:
    """Train what requires a gradient by AdamW with a weight decay of 0.01; the model is in its training mode.

    Args:
        tokens: the records, at least one.
        seed: seed of the order of records.
        description: text of the progress bar.
        losses: the (rows,) losses of a batch, of the model, its ids and its mask.
        autocast: dtype of the forward pass.
        schedule: a key of ``SCHEDULES``.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, batches_an_epoch = parameters[0].device, math.ceil(len(tokens.rows) / batch_size)
    steps = epochs * batches_an_epoch
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: SCHEDULES[schedule](step, steps))
    order = np.random.default_rng(seed)
    # In percent: the number of steps would tell how many records there are.
    for step in progress(range(steps), description, total=steps, percent=True):
        if step % batches_an_epoch == 0:
            batches = np.array_split(order.permutation(len(tokens.rows)), batches_an_epoch)
        ids, mask = tokens.compact(batches[step % batches_an_epoch], device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            loss = losses(model, ids, mask).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rates.step()


def one_cycle(step: int, steps: int) -> float:
    """Share of the highest learning rate: a cosine from 1/25 up over a tenth of the steps, then down to 1/250,000.

    As torch's ``OneCycleLR``, which divides by zero at ten steps and hardly moves at one: whether a private model can
    be trained must not depend on how many records it has.
    """
    top, first, last = max(0.1 * steps - 1, 0.0), 1 / 25, 1 / 25 / 1e4
    if step < top:
        return first + (1 - first) * (1 - math.cos(math.pi * step / top)) / 2
    done = (step - top) / max(steps - 1 - top, 1.0)
    return last + (1 - last) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def linear(step: int, steps: int) -> float:
    """Share of the highest learning rate: from 1 down to 0 after the last step."""
    return 1 - min(step / max(steps, 1), 1.0)


SCHEDULES: dict[str, Callable[[int, int], float]] = {"one_cycle": one_cycle, "linear": linear}
