"""Frozen layers below the first that trains: their states of a record are computed once, and read at every later step.

Where only upper layers train (``target_modules`` with a regular expression of their names), the layers below give the
same states of a record at every step. ``FrozenLayers`` keeps those states in memory, and no file ever holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dptune.training.data import Tokens
from dptune.training.gradients.gradient_check import made_up_records
from dptune.training.gradients.parameter_groups import Block, LayerModules, PairModules
from dptune.training.losses import model_losses
from dptune.training.models.memory import available_memory

#: States may take this share of the memory that is free when a run starts.
_SHARE = 0.25
#: A record that is read fewer times than this on average is not worth its memory.
_LEAST_VISITS = 2.0


class _Reached(Exception):  # noqa: N818 (no error: it ends a pass that has what it wanted)
    """Carries the states that arrived at the first layer that trains."""

    def __init__(self, states: torch.Tensor) -> None:
        super().__init__()
        self.states = states


@dataclass
class FrozenLayers:
    """The layers of a model below the first that trains, and their states of each record. Private.

    Attributes:
        below: the layers that are left out once a record's states are known, in their order.
        first: the first layer that trains, or holds a module that does.
    """

    model: nn.Module
    below: Sequence[nn.Module]
    first: nn.Module
    _states: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def fill(
        self, records: Sequence[int], tokens: Tokens, rows: int, width: int, autocast: torch.dtype | None = None
    ) -> None:
        """Compute the states of those records that have none at this width, in batches of the shape of a step's."""
        missing = [record for record in dict.fromkeys(records) if (record, width) not in self._states]
        for start in range(0, len(missing), rows):
            part = missing[start : start + rows]
            device = next(self.model.parameters()).device
            found = self.states_of(*tokens.batch(part, device, height=rows, width=width), autocast)  # type: ignore[arg-type]
            self._states.update({(record, width): found[row].clone() for row, record in enumerate(part)})

    def states_of(self, ids: torch.Tensor, mask: torch.Tensor, autocast: torch.dtype | None = None) -> torch.Tensor:
        """(rows, tokens, hidden) states that arrive at ``first``, from (rows, tokens) ids and mask."""

        def reached(*inputs: Any, **named: Any) -> Any:
            raise _Reached(inputs[0] if inputs else named["hidden_states"])

        with _forwards({self.first: reached}), torch.no_grad():
            try:
                with torch.autocast(ids.device.type, dtype=autocast, enabled=autocast is not None):
                    model_losses(self.model, ids, mask)
            except _Reached as end:
                return end.states
        raise RuntimeError("the first layer that trains was never reached")

    @contextmanager
    def kept(self, records: Sequence[int], rows: int, width: int) -> Iterator[None]:
        """Context in which the model reads these records' states in place of computing them; ``fill`` comes first.

        Args:
            records: those of a micro-batch, in its order. Rows beyond them have states of zeros, and count nowhere.
        """
        known = [self._states[record, width] for record in records]
        states = torch.zeros(rows, *known[0].shape, dtype=known[0].dtype, device=known[0].device)
        torch.stack(known, out=states[: len(known)])
        with self.given(states):
            yield

    @contextmanager
    def given(self, states: torch.Tensor) -> Iterator[None]:
        """Context in which the layers below do nothing, and ``first`` starts from these states."""
        forward = self.first.forward

        def start(*inputs: Any, **named: Any) -> Any:
            if inputs:
                return forward(states, *inputs[1:], **named)
            return forward(**{**named, "hidden_states": states})

        with _forwards({self.first: start, **dict.fromkeys(self.below, _as_it_came)}):
            yield


def frozen_layers(
    model: nn.Module,
    blocks: Sequence[Block],
    tokens: Tokens,
    *,
    rows: int,
    widths: Sequence[int],
    visits: float,
    autocast: torch.dtype | None = None,
) -> FrozenLayers | None:
    """The frozen layers of a model whose states are worth keeping; None where there are none.

    Nothing may change but the time: losses and their gradients of made-up tokens are computed both ways, and must be
    equal in every bit. A model whose layers hand on more than one tensor, or read more of those below, is left alone.

    Args:
        blocks: the modules that train.
        rows, widths: shapes of a step's micro-batches.
        visits: how often a record is read in the whole run, on average.
    """
    device = next(model.parameters()).device
    if device.type != "cpu" or visits < _LEAST_VISITS or (found := _split(model, blocks)) is None:
        return None
    # A record of a unit with several may be kept at each width.
    size = 4 * len(tokens.rows) * sum(widths) * model.config.get_text_config().hidden_size  # type: ignore[operator, union-attr]
    if size > _SHARE * available_memory():
        return None
    same = all(_equal_in_every_bit(found, blocks, rows, width, autocast) for width in widths)
    return found if same else None


def _split(model: nn.Module, blocks: Sequence[Block]) -> FrozenLayers | None:
    """The layers below the first that trains, if all layers stand in one list and all LoRA pairs in them."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and any(isinstance(each, GradientCheckpointingLayer) for each in module)
    ]
    if len(lists) != 1:
        return None
    owners = [{id(module) for module in layer.modules()} for layer in lists[0]]
    first = len(owners)
    for block in blocks:
        if isinstance(block, LayerModules):  # one outside of the list reads the last layer, or gradients will differ
            at = [number for number, own in enumerate(owners) for layer in block.modules if id(layer) in own]
            first = min([first, *at])
        elif isinstance(block, PairModules):  # a head reads the last layer
            at = [number for number, own in enumerate(owners) if id(block.up) in own]
            first = min([first, *at]) if at else 0
    return FrozenLayers(model, list(lists[0])[:first], lists[0][first]) if 0 < first < len(owners) else None


def _equal_in_every_bit(
    found: FrozenLayers, blocks: Sequence[Block], rows: int, width: int, autocast: torch.dtype | None
) -> bool:
    """Whether losses and gradients are the same from states that were computed among rows in another order."""
    device, order = next(found.model.parameters()).device, list(reversed(range(rows)))
    ids, mask = made_up_records(found.model, [max(3, width - 1 - row) for row in range(rows)], width)
    weights = [weight for block in blocks for weight in block.parameters]

    def gradients() -> list[torch.Tensor]:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            losses = model_losses(found.model, ids, mask)
        return [losses.detach(), *torch.autograd.grad(losses.sum(), weights)]

    modes = [(module, module.training) for module in found.model.modules()]
    found.model.eval()  # the two passes would draw other masks of dropout
    try:
        whole = gradients()
        states = torch.empty_like(found.states_of(ids, mask, autocast))
        states[order] = found.states_of(ids[order], mask[order], autocast)
        with found.given(states):
            return all(map(torch.equal, whole, gradients()))
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
        return False  # layers that take or give something else
    finally:
        for module, training in modes:
            module.training = training


def _as_it_came(*inputs: Any, **named: Any) -> Any:
    """A layer that does nothing."""
    return inputs[0] if inputs else named["hidden_states"]


@contextmanager
def _forwards(of: dict[nn.Module, Any]) -> Iterator[None]:
    """Context in which modules have other forward functions."""
    own = {module: vars(module).get("forward") for module in of}
    try:
        for module, forward in of.items():
            module.forward = forward
        yield
    finally:
        for module, before in own.items():
            vars(module).pop("forward", None)
            if before is not None:
                module.forward = before
