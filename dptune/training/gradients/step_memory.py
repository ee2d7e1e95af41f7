"""Memory of a step: micro-batches of one public shape, and layers that keep their input only (checkpointing).

A checkpointed layer runs again when the rest is needed. transformers' own switch works in training mode only, in which
a frozen model's dropout would draw masks over the whole batch. So layers are wrapped here, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dptune.core.errors import ConfigError


@dataclass(frozen=True)
class MicroBatch:
    """Whole units that are processed together in one pass.

    Attributes:
        records: indices of the rows.
        owners: position of each row's unit within this micro-batch.
        units: number of units.
    """

    records: NDArray[np.int64] = field(repr=False)
    owners: NDArray[np.int64] = field(repr=False)
    units: int

    def owners_of(self, height: int, device: torch.device) -> torch.Tensor | None:
        """(height,) unit of each row, ``units`` for rows that only fill the batch; None if row j is unit j."""
        if np.array_equal(self.owners, np.arange(self.units)):
            return None
        owners = np.full(height, self.units)
        owners[: len(self.owners)] = self.owners
        return torch.from_numpy(owners).to(device)


def public_widths(width: int, expected_batch_size: float, rows: int) -> tuple[int, ...]:
    """The widths that micro-batches may have, descending: ``width``, its half, its quarter and so on.

    Padding fills up the last micro-batch of each width. So a half is added as long as the micro-batches of all added
    halves, one of each, have at most a quarter of the tokens of an expected batch at the full width, and as long as it
    has 16 tokens: no half where a batch has less than twice ``rows``, and all where it has four times as many. That
    bound is one for units of one record, on one device: each device fills up its own micro-batches.

    Args:
        rows: physical batch size.

    Example:
        >>> public_widths(512, 64.0, 16), public_widths(512, 18.0, 16)
        ((512, 256, 128, 64, 32, 16), (512,))
    """
    halves = [width]
    while (half := -(-halves[-1] // 2)) >= 16 and rows * (sum(halves[1:]) + half) <= expected_batch_size * width / 4:
        halves.append(half)
    return tuple(halves)


def micro_batches(batch: list[NDArray[np.int64]], rows: int) -> Iterator[MicroBatch]:
    """Split a drawn batch into micro-batches of at most ``rows`` rows; a unit is never split.

    Raises: ConfigError if a unit alone has more rows.
    """
    if any(len(unit) > rows for unit in batch):
        raise ConfigError(
            "training.physical_batch_size", f"{rows} is less than one unit's rows", fix="raise it to the most per unit"
        )
    group: list[NDArray[np.int64]] = []
    filled = 0
    for unit in batch:
        if group and filled + len(unit) > rows:
            yield _as_micro_batch(group)
            group, filled = [], 0
        group.append(unit)
        filled += len(unit)
    if group:
        yield _as_micro_batch(group)


def _as_micro_batch(group: list[NDArray[np.int64]]) -> MicroBatch:
    owners = np.repeat(np.arange(len(group)), [len(unit) for unit in group])
    return MicroBatch(np.concatenate(group), owners, len(group))


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


@contextmanager
def same_kernels(*, enabled: bool) -> Iterator[None]:
    """Context in which torch takes kernels that give the same numbers in each pass, where it has them."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(before[0] or enabled, warn_only=before[1] or not before[0])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
