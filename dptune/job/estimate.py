"""Estimates a run's memory and time before it starts, from shapes and from the device's speed of multiplication."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from dptune.job.base_model import Base
from dptune.job.defaults import TuneSchedule

_LOGIT_COPIES = 4  # float32 copies: logits, their logarithms, the gradient of each
_ACTIVATIONS = 20  # vectors of the layer's width that each token keeps in each layer for the backward pass
#: Elementwise operations on such vectors, in each layer and both passes: norms, rotations, activations, sums.
_VECTOR_OPERATIONS = 200
_ROWS, _MEASURED_SECONDS = 256, 0.2
_STEP_SECONDS = 0.02  # fixed cost of a micro-batch, however small the model


@dataclass(frozen=True)
class Estimate:
    """The resources that a run needs.

    Attributes:
        memory: bytes on the device.
        seconds: time of all steps, without the evaluations.
    """

    memory: float
    seconds: float


def estimate(
    base: Base,
    schedule: TuneSchedule,
    rows: int,
    records_each: float = 1.0,
    *,
    checkpointing: bool = False,
    bands: int = 1,
) -> Estimate:
    """The estimate of a run with micro-batches of ``rows`` records; measures the device for a third of a second.

    Args:
        records_each: that a drawn unit brings.
        checkpointing: whether layers keep their inputs alone, and run again.
        bands: steps over which noise is correlated; the noise of all but one is kept in float64.
    """
    tokens, own = rows * schedule.max_length, base.trained.train != "lora"
    frozen = base.frozen_bytes - (4 * base.dimension if own else 0)  # what trains is counted in the next line
    # float32: weights, gradient, two moments; float64: the sum, and past noise.
    adapters = base.dimension * (4 * 4 + 8 + 8 * (bands - 1))
    # Training a model's own weights keeps no unit's gradient, but another sum in float64 and the noise of all weights.
    per_sample = base.dimension * 16 if own else rows * base.dimension * 4
    logits = _LOGIT_COPIES * 4 * tokens * base.vocabulary
    kept = _ACTIVATIONS + base.layers if checkpointing else _ACTIVATIONS * base.layers
    activations = kept * tokens * base.width * base.bytes_each
    passes = schedule.steps * math.ceil(schedule.expected_batch_size * records_each / rows)
    # Two operations a parameter and token in the forward pass, and two in the backward pass: frozen weights need no
    # gradient. Those that train need two more, and two passes: one for the norms, one for the sum. A checkpointed layer
    # runs forward twice.
    each = (12 if own else 4) + (4 if own and checkpointing else 2 if checkpointing else 0)
    products = each * base.parameters * tokens / _product_speed(base)
    vectors = _VECTOR_OPERATIONS * tokens * base.width * base.layers / _vector_speed(base)
    return Estimate(
        memory=float(frozen + adapters + per_sample + logits + activations),
        seconds=passes * (products + vectors + _STEP_SECONDS),
    )


def _product_speed(base: Base) -> float:
    """Operations a second of a matrix product of the model's width and dtype on its device."""
    weights, rows, seconds = _ones(base, base.width, base.width), 0, 0.0
    # A CPU may take a minute for all rows in bfloat16: fewer are as slow, row by row.
    while seconds < _MEASURED_SECONDS / 4 and rows < _ROWS:
        rows = min(8 * rows or 8, _ROWS)
        states = _ones(base, rows, base.width)
        seconds = _seconds(partial(torch.matmul, states, weights))
    return 2 * rows * base.width * base.width / seconds


def _vector_speed(base: Base) -> float:
    """Numbers a second that an elementwise operation passes in the model's dtype on its device."""
    states = _ones(base, _ROWS, base.width)
    return states.numel() / _seconds(lambda: torch.nn.functional.silu(states))


def _ones(base: Base, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16 if base.bytes_each == 2 else torch.float32, device=base.device)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Time of one call; a device answers when it is asked for a number."""
    start = time.monotonic()
    work().sum().item()  # the first one also starts the device
    together = 4 if time.monotonic() - start < _MEASURED_SECONDS / 4 else 1
    start, done = time.monotonic(), 0
    while (passed := time.monotonic() - start) < _MEASURED_SECONDS or not done:
        for _ in range(together):
            result = work()
        result[0, 0].item()
        done += together
    return passed / done
