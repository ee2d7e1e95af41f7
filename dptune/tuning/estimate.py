"""Estimates a run's memory and time before it starts, from shapes and from the device's speed of multiplication."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from dptune.tuning.base import Base
from dptune.tuning.defaults import TuneSchedule

_LOGIT_COPIES = 4  # float32 copies: logits, their logarithms, the gradient of each
_ACTIVATIONS = 20  # vectors of the layer's width that each token keeps in each layer for the backward pass
_SIDE, _MEASURED_SECONDS = 1024, 0.3
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


def estimate(base: Base, schedule: TuneSchedule, rows: int, records_each: float = 1.0) -> Estimate:
    """The estimate of a run with micro-batches of ``rows`` records; measures the device for a third of a second.

    Args:
        records_each: that a drawn unit brings.
    """
    tokens = rows * schedule.max_length
    frozen = base.parameters * base.bytes_each
    adapters = base.dimension * (4 * 4 + 8)  # float32: weights, gradient, two moments; the float64 sum
    per_sample = rows * base.dimension * 4
    logits = _LOGIT_COPIES * 4 * tokens * base.vocabulary
    activations = _ACTIVATIONS * tokens * base.width * base.layers * base.bytes_each
    # Two operations a parameter and token in the forward pass, and two in the backward pass: frozen weights need no
    # gradient.
    passes = schedule.steps * math.ceil(schedule.batch * records_each / rows)
    work = 4 * base.parameters * tokens * passes
    return Estimate(
        memory=float(frozen + adapters + per_sample + logits + activations),
        seconds=work / _speed(base) + passes * _STEP_SECONDS,
    )


def _speed(base: Base) -> float:
    """Operations a second of a square matrix product in the model's dtype on its device."""
    dtype = torch.bfloat16 if base.bytes_each == 2 else torch.float32
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device=base.device)
    (matrix @ matrix).sum().item()  # the first one also starts the device
    start, done = time.monotonic(), 0
    while time.monotonic() - start < _MEASURED_SECONDS:
        (matrix @ matrix).sum().item()
        done += 1
    return done * 2 * _SIDE**3 / (time.monotonic() - start)
