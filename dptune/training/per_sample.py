"""Per-sample gradients of LoRA pairs.

For a linear layer y = W x the gradient of sample b is sum_t outer(dL/dy[b, t], x[b, t]). Forward hooks keep x
and y of every lora_A and lora_B; one ``torch.autograd.grad`` asks for dL/dy alone, so that no weight gradient
is ever computed over the batch. A LoRA gradient is small (rank times width), so it is kept per unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dptune.training.losses import sequence_losses


@dataclass(frozen=True)
class PairModules:
    """One LoRA pair: its name in the model and its two linear layers."""

    name: str
    down: torch.nn.Linear  # lora_A: width -> rank
    up: torch.nn.Linear  # lora_B: rank -> width

    @property
    def layers(self) -> tuple[torch.nn.Linear, ...]:
        """A then B, the order in which a pair's flat vector holds them; without A where it is frozen."""
        return (self.down, self.up) if self.down.weight.requires_grad else (self.up,)

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The weights of ``layers``."""
        return tuple(layer.weight for layer in self.layers)


def lora_pairs(model: torch.nn.Module) -> list[PairModules]:
    """Every LoRA pair, in model order.

    Raises: ValueError if some trainable parameter belongs to no pair (it would train without privacy).
    """
    pairs = [
        PairModules(name, module.lora_A["default"], module.lora_B["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and "default" in getattr(module, "lora_A", {})
    ]
    covered = {id(parameter) for pair in pairs for parameter in pair.parameters}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            raise ValueError(f"trainable parameter {name} is in no LoRA pair, so its gradient would not be privatised")
    if len(covered) != sum(len(pair.layers) for pair in pairs):
        raise ValueError("two LoRA pairs share a parameter")
    return pairs


class PairGradients:
    """Gradients of one micro-batch: one row per unit, one tensor per pair. Private, never leaves the step.

    A unit with any non-finite entry becomes all zeros, so that it cannot spread and its influence stays bounded.
    """

    def __init__(self, per_pair: list[torch.Tensor], losses: torch.Tensor) -> None:
        """Take the gradients and losses of the units.

        Args:
            per_pair: for each pair a (units, parameters of the pair) float32 tensor.
            losses: (units,) mean loss of each unit's records.
        """
        # float32 norms of long vectors err by more than any margin one would like to keep.
        norms = torch.stack(
            [torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64) for gradient in per_pair], dim=1
        )
        finite = torch.isfinite(norms).all(dim=1)
        if not bool(finite.all()):
            per_pair = [torch.where(finite[:, None], gradient, 0.0) for gradient in per_pair]
            norms = torch.where(finite[:, None], norms, 0.0)
        self._per_pair, self._norms = per_pair, norms
        self._losses = losses.double().nan_to_num(0.0, 0.0, 0.0)

    def norms(self) -> torch.Tensor:
        """(units, pairs) float64 l2 norms, A and B jointly."""
        return self._norms

    def losses(self) -> torch.Tensor:
        """(units,) float64 mean loss of each unit's records; 0 where it was not finite."""
        return self._losses

    def matrix(self) -> torch.Tensor:
        """(units, parameters) float64: whole gradients, pair after pair."""
        return torch.cat(self._per_pair, dim=1).double()

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """Per pair, sum over units of factors[unit, pair] * gradient, flat float64."""
        factors = factors.double()
        return [factors[:, pair] @ gradient.double() for pair, gradient in enumerate(self._per_pair)]


def per_sample_gradients(
    model: Any,
    pairs: list[PairModules],
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    owners: torch.Tensor,
    units: int,
    *,
    autocast: torch.dtype | None = None,
) -> tuple[PairGradients, torch.Tensor]:
    """Gradients of each unit's loss, and the detached losses.

    A unit's loss is the sum of its rows' losses (one row for an encounter, up to m for a patient).

    Args:
        model: the PEFT model.
        pairs: from ``lora_pairs(model)``.
        input_ids: (rows, tokens), rows > 0.
        mask: (rows, tokens).
        owners: (rows,) index of each row's unit; ``units`` for a row that only fills the batch.
        units: number of units in this micro-batch.
        autocast: run the forward pass in this dtype; gradients, norms and clipping stay float32.

    Returns: gradients (units, ...) per pair, and (rows,) losses: both private.
    """
    device = input_ids.device.type
    with _tapped(pairs) as taps, torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    losses = sequence_losses(logits, input_ids, mask)
    outputs = [output for _, output in taps]
    output_gradients = torch.autograd.grad(losses.sum(), outputs)
    per_parameter = iter(
        _sum_by_owner(_linear_gradient(tap[0], gradient), owners, units)
        for tap, gradient in zip(taps, output_gradients, strict=True)
    )
    per_pair = [torch.cat([next(per_parameter) for _ in pair.layers], dim=1) for pair in pairs]
    losses = losses.detach()
    rows = _sum_by_owner(torch.ones_like(losses)[:, None], owners, units)
    of_units = _sum_by_owner(losses[:, None], owners, units) / rows
    return PairGradients(per_pair, of_units[:, 0]), losses


def _linear_gradient(inputs: torch.Tensor, output_gradient: torch.Tensor) -> torch.Tensor:
    """(rows, out * in) in float32, whatever dtype the forward pass ran in."""
    return torch.einsum("bto,bti->boi", output_gradient.float(), inputs.float()).flatten(1)


def _sum_by_owner(rows: torch.Tensor, owners: torch.Tensor, units: int) -> torch.Tensor:
    return rows.new_zeros(units + 1, rows.shape[1]).index_add_(0, owners, rows)[:units]


@contextmanager
def _tapped(pairs: list[PairModules]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Record (input, output) of every A and B, in pair order."""
    layers = [layer for pair in pairs for layer in pair.layers]
    taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    taps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if id(layer) in taken:
            raise RuntimeError("a LoRA layer ran twice in one forward pass: its per-sample gradient is not supported")
        taken[id(layer)] = (inputs[0].detach(), output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield taps
        missing = [pair.name for pair in pairs if any(id(layer) not in taken for layer in pair.layers)]
        if missing:
            raise RuntimeError(f"LoRA pair {missing[0]} took no part in the forward pass")
        taps.extend(taken[id(layer)] for layer in layers)
    finally:
        for handle in handles:
            handle.remove()
