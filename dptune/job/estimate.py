"""Memory and time of a run before it starts, and micro-batches that fit.

All of it follows from shapes, from the device's speed of multiplication, and, for the time alone, from the lengths of
records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dptune.core.settings import StepSettings
from dptune.job.base_model import Base
from dptune.job.run_spec import CONTEXT, TuneSchedule
from dptune.job.settings import TuneSettings
from dptune.training.data import Tokens, by_width
from dptune.training.gradients.step_memory import public_widths
from dptune.training.models.memory import available_memory
from dptune.training.privacy_units import PrivacyUnits

_LOGIT_COPIES = 4  # float32 copies: logits, their logarithms, the gradient of each
_ACTIVATIONS = 20  # vectors of the layer's width that each token keeps in each layer for the backward pass
#: Elementwise operations on such vectors, in each layer and both passes: norms, rotations, activations, sums.
_VECTOR_OPERATIONS = 200
_ROWS, _MEASURED_SECONDS = 256, 0.2
_COUNTED = 10_000  # units
_STEP_SECONDS = 0.02  # fixed cost of a micro-batch, however small the model
#: The most bytes of a micro-batch on a CPU: 16 records of 128 tokens of a model of 135 million parameters just fit.
_CPU_BYTES = 5 * 2**30
_GRADIENTS = 2**28  # of a micro-batch on another device: a GiB in float32


def rows_of(settings: TuneSettings, base: Base, schedule: TuneSchedule, most: int) -> int:
    """Records of a micro-batch, given or chosen; ``most`` as ``units_of_side``."""
    row = row_bytes(base, schedule.max_length, checkpointing=settings.gradient_checkpointing)
    chosen = default_rows(schedule, base.device.type, most, base.dimension, row)
    return settings.physical_batch_size or chosen


def default_rows(schedule: TuneSchedule, device: str, most: int, dimension: int, row: float) -> int:
    """Records of a micro-batch that ``physical_batch_size`` leaves open. Public; changes only memory and speed.

    A CPU is bound by arithmetic, and small micro-batches have fewer padded tokens: it takes 16 records, or fewer if
    those do not fit in 5 GiB. Another device is faster with few micro-batches. Of the expected batch and three
    standard deviations of Poisson sampling, each takes all, or an equal part with no more padded tokens than 16 records
    of the longest default width, and no more than a GiB of gradients. A unit counts as one record here, for how many it
    really brings is private.

    Args:
        device: its type, such as cpu or cuda.
        most: records that one unit may bring.
        dimension: trained weights.
        row: bytes that each record takes, see ``row_bytes``.

    Example:
        >>> from dptune.core.settings import UpdateRule
        >>> schedule = TuneSchedule(1e-5, 128.0, 3, 0.064, 47, 0.005, 5, 1, 64, {}, UpdateRule(), {})
        >>> default_rows(schedule, "cuda", 1, 460_800, 1.4e8), default_rows(schedule, "cpu", 1, 460_800, 1.4e8)
        (81, 16)
        >>> default_rows(schedule, "cpu", 1, 460_800, row=1e9)
        5
    """
    if device == "cpu":
        return max(1, most, min(StepSettings.physical_batch_size, int(_CPU_BYTES // row)))
    least = max(StepSettings.physical_batch_size, most)
    batch = schedule.expected_batch_size
    whole = math.ceil(batch + 3 * math.sqrt(batch * (1 - min(schedule.sample_rate, 1.0))))
    most_rows = min(StepSettings.physical_batch_size * CONTEXT // schedule.max_length, _GRADIENTS // dimension)
    parts = math.ceil(whole / max(most_rows, least))
    return max(least, math.ceil(whole / parts))


def row_bytes(base: Base, length: int, *, checkpointing: bool = False) -> float:
    """Bytes that each record of a micro-batch takes: its logits, what layers keep of it, and its gradient.

    Args:
        length: tokens of the record.
        checkpointing: whether layers keep their inputs alone, and run again.
    """
    logits = _LOGIT_COPIES * 4 * base.vocabulary
    kept = _ACTIVATIONS + base.layers if checkpointing else _ACTIVATIONS * base.layers
    gradient = 4 * base.dimension if base.trained.train == "lora" else 0  # else it goes into the sum at once
    return length * (logits + kept * base.width * base.bytes_each) + gradient


def memory_warning(settings: TuneSettings, base: Base, schedule: TuneSchedule, most: int, bands: int = 1) -> str:
    """A sentence for the owner if a run takes more memory than this machine has left; empty if it does not, and where
    it runs on a GPU, which tells by itself. Public.

    Args:
        most: records that one unit may bring.
        bands: as ``fixed_bytes``.
    """
    if base.device.type != "cpu":
        return ""
    rows, left = rows_of(settings, base, schedule, most), available_memory()
    fixed = fixed_bytes(base, bands) - (base.frozen_bytes if base.checkpoint is None else 0)  # it is there already
    row = row_bytes(base, schedule.max_length, checkpointing=settings.gradient_checkpointing)
    if (needed := fixed + rows * row) <= left:
        return ""
    if (fewer := int((left - fixed) // row)) >= max(1, most):
        fix = f"lower physical_batch_size to {fewer}, which moves no figure"
    elif fewer < 0:
        fix = "take a smaller model, hold it in fewer bits, or take a machine with more memory"
    else:
        again = "" if settings.gradient_checkpointing else "gradient_checkpointing, "
        fix = f"take a smaller model, fewer tokens (max_length), {again}or a machine with more memory"
    return (
        f"the run needs some {needed / 2**30:.1f} GiB of memory, and {left / 2**30:.1f} are left here. Without enough "
        f"the system may end it at any step, and says nothing. Fix: {fix}."
    )


def fixed_bytes(base: Base, bands: int = 1) -> float:
    """Bytes that a run takes beside its micro-batches: frozen weights, and those that train with their moments.

    Args:
        bands: steps over which noise is correlated; the noise of all but one is kept in float64.
    """
    own = base.trained.train != "lora"
    frozen = base.frozen_bytes - (4 * base.dimension if own else 0)  # what trains is counted in the next line
    # float32: weights, gradient, two moments; float64: the sum, and past noise.
    adapters = base.dimension * (4 * 4 + 8 + 8 * (bands - 1))
    # Training a model's own weights keeps no unit's gradient, but another sum in float64 and the noise of all weights.
    return frozen + adapters + (16 * base.dimension if own else 0)


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
    brought: Mapping[int, float] | None = None,
    *,
    checkpointing: bool = False,
    bands: int = 1,
) -> Estimate:
    """The estimate of a run with micro-batches of ``rows`` records; measures the device for a third of a second.

    Args:
        brought: records that a drawn unit brings, by the width of their micro-batches (``records_by_width``); None:
            one of the greatest width.
        checkpointing: whether layers keep their inputs alone, and run again.
        bands: steps over which noise is correlated; the noise of all but one is kept in float64.
    """
    own = base.trained.train != "lora"
    brought = brought or {schedule.max_length: 1.0}
    parts = {width: math.ceil(schedule.expected_batch_size * each / rows) for width, each in brought.items()}
    # Two operations a parameter and token in the forward pass, and two in the backward pass: frozen weights need no
    # gradient. Those that train need two more, and two passes: one for the norms, one for the sum. A checkpointed layer
    # runs forward twice.
    each = (12 if own else 4) + (4 if own and checkpointing else 2 if checkpointing else 0)
    products = each * base.parameters / _product_speed(base)
    vectors = _VECTOR_OPERATIONS * base.width * base.layers / _vector_speed(base)
    step = sum(count * (rows * width * (products + vectors) + _STEP_SECONDS) for width, count in parts.items())
    return Estimate(
        memory=fixed_bytes(base, bands) + rows * row_bytes(base, schedule.max_length, checkpointing=checkpointing),
        seconds=schedule.steps * step,
    )


def records_by_width(tokens: Tokens, units: PrivacyUnits, schedule: TuneSchedule, rows: int) -> dict[int, float]:
    """Records that a unit brings to a batch on average, by the width that they need. Private.

    Each unit's records are drawn once. Of more than 10,000 units, 10,000 are drawn too.
    """
    chance = np.random.default_rng(0)
    chosen = chance.permutation(len(units.members))[:_COUNTED]
    drawn = [chance.permutation(unit)[: units.most] for unit in map(units.members.__getitem__, chosen) if len(unit)]
    widths = public_widths(tokens.width, schedule.expected_batch_size, rows)
    return {width: sum(map(len, held)) / len(chosen) for width, held in by_width(drawn, tokens, widths)}


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
