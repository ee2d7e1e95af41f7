"""Computes per-sample gradients of LoRA pairs, and of a classification head's linear layers.

For a linear layer y = W x the gradient of sample b is sum_t outer(dL/dy[b, t], x[b, t]). Inputs and outputs of every
lora_A and lora_B are tapped on the way forward; on the way back each dL/dy becomes, as soon as it is there, the part of
a (rows, parameters) table that belongs to its layer. No weight gradient is ever computed over the batch. Pairs of one
shape lie side by side in the table, so that norms and sums take one kernel for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from dptune.core.errors import ConfigError
from dptune.training.gradients.parameter_groups import _FIELD, Block, LayerModules
from dptune.training.gradients.step_memory import checkpointed
from dptune.training.losses import counted_tokens, model_losses
from dptune.training.models.trained_layers import HeadModules

_LEAVE_OUT = "name the other layers that are to train, without this one"


@dataclass(frozen=True)
class Layout:
    """The columns of each weight in a (rows, parameters) table; pairs of one size are side by side.

    Attributes:
        shapes: shapes of each pair's weights, in the order of its flat vector.
    """

    shapes: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, pairs: Sequence[Block]) -> Layout:
        """The layout of these pairs' trained weights. A bias is a weight whose input is 1."""
        return cls(tuple(tuple((len(w), w.numel() // len(w)) for w in pair.parameters) for pair in pairs))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of parameters of each pair."""
        return tuple(sum(out * into for out, into in shapes) for shapes in self.shapes)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the pairs of each size, in the order of the columns."""
        return tuple(
            tuple(pair for pair, other in enumerate(self.sizes) if other == size) for size in dict.fromkeys(self.sizes)
        )

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """The first column of each weight, pair by pair."""
        starts: dict[int, tuple[int, ...]] = {}
        column = 0
        for pair in (pair for group in self.groups for pair in group):
            own = []
            for out, into in self.shapes[pair]:
                own.append(column)
                column += out * into
            starts[pair] = tuple(own)
        return tuple(starts[pair] for pair in range(len(self.shapes)))

    def weight(self, table: torch.Tensor, pair: int, weight: int) -> torch.Tensor:
        """The (rows, out, in) view of one weight's columns."""
        start, (out, into) = self.starts[pair][weight], self.shapes[pair][weight]
        return table[:, start : start + out * into].unflatten(1, (out, into))

    def split(self, table: torch.Tensor) -> list[torch.Tensor]:
        """Views of the table's columns, one for each group: (rows, pairs of the group, parameters of a pair)."""
        counts = [(len(group), self.sizes[group[0]]) for group in self.groups]
        parts = table.split([count * size for count, size in counts], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, counts, strict=True)]


class PairGradients:
    """Gradients of one micro-batch: one row per unit, pairs of one size in one tensor. Private, never leaves the step.

    A unit with any non-finite entry becomes all zeros, so that it cannot spread and its influence stays bounded.
    """

    def __init__(
        self, per_pair: Sequence[torch.Tensor], losses: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> None:
        """Take the gradients and losses of the units.

        Args:
            per_pair: one (units, parameters of the pair) float32 tensor for each pair.
            losses: (units,) mean loss of each unit's records.
            tokens: (units,) number of tokens that count in each unit's loss; None: as many in each.
        """
        layout = Layout(tuple(((1, part.shape[1]),) for part in per_pair))
        groups = [torch.stack([per_pair[pair] for pair in group], dim=1) for group in layout.groups]
        self._take(groups, layout, losses, torch.ones_like(losses) if tokens is None else tokens)

    @classmethod
    def of_table(cls, table: torch.Tensor, layout: Layout, losses: torch.Tensor, tokens: torch.Tensor) -> PairGradients:
        """Make gradients of a (units, parameters) float32 table, which is overwritten."""
        gradients = cls.__new__(cls)
        gradients._take(layout.split(table), layout, losses, tokens)
        return gradients

    def _take(self, groups: list[torch.Tensor], layout: Layout, losses: torch.Tensor, tokens: torch.Tensor) -> None:
        # float32 norms of long vectors err by more than any margin one would like to keep.
        by_group = [torch.linalg.vector_norm(group, dim=2, dtype=torch.float64) for group in groups]
        norms = (
            by_group[0]
            if len(groups) == 1
            else torch.stack(_in_pair_order(layout, [part.unbind(1) for part in by_group]), dim=1)
        )
        broken = ~torch.isfinite(norms).all(dim=1)
        # Always, and not only where a unit is broken: to look would make an accelerator wait.
        for group in groups:
            group.masked_fill_(broken[:, None, None], 0.0)
        self._groups, self._layout = groups, layout
        self._norms = norms.masked_fill(broken[:, None], 0.0)
        self._losses, self._tokens = losses.double().nan_to_num(0.0, 0.0, 0.0), tokens.double()

    def norms(self) -> torch.Tensor:
        """(units, pairs) float64 l2 norms, A and B jointly."""
        return self._norms

    def losses(self) -> torch.Tensor:
        """(units,) float64 mean loss of each unit's records; 0 where it was not finite."""
        return self._losses

    def tokens(self) -> torch.Tensor:
        """(units,) float64 number of tokens that count in each unit's loss."""
        return self._tokens

    def matrix(self) -> torch.Tensor:
        """(units, parameters) float64: whole gradients, pair after pair."""
        return torch.cat(_in_pair_order(self._layout, [group.unbind(1) for group in self._groups]), dim=1).double()

    def weighted_sum(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """The sum over units of factors[unit, pair] * gradient, one flat float64 vector for each pair."""
        of_pairs, sums = factors.double().unbind(1), []
        for group, pairs in zip(self._groups, self._layout.groups, strict=True):
            chosen = torch.stack([of_pairs[pair] for pair in pairs])
            sums.append(torch.bmm(chosen[:, None], group.transpose(0, 1).double())[:, 0].unbind(0))
        return _in_pair_order(self._layout, sums)


def _in_pair_order(layout: Layout, by_group: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    found = {
        pair: part
        for pairs, parts in zip(layout.groups, by_group, strict=True)
        for pair, part in zip(pairs, parts, strict=True)
    }
    return [found[pair] for pair in range(len(found))]


def by_row(states: torch.Tensor, rows: int, tokens: int, layer: str) -> torch.Tensor:
    """Reshape the inputs or outputs of a layer to (rows, tokens, width), if its first dimension is the batch's rows.

    Some layers (OPT's feed-forward ones) get (rows * tokens, width), row after row. Anything else would be multiplied
    into other records' gradients, or leave memory as it was: experts, which see some tokens; layers that put tokens
    first; layers that see one row for all.

    Args:
        tokens: number of tokens of a row; -1 accepts any.

    Raises: ConfigError naming the layer.
    """
    if states.dim() == 2 and len(states) == rows * tokens:
        return states.unflatten(0, (rows, tokens))
    if states.dim() == 2 and tokens < 0 and len(states) % rows == 0:
        return states.unflatten(0, (rows, -1))
    if states.dim() == 3 and len(states) == rows:
        return states
    batch = f"{rows} rows of {tokens} tokens" if tokens >= 0 else f"{rows} rows"
    problem = (
        f"layer {layer} saw a tensor of shape {tuple(states.shape)} for {batch}, so no record's part of it is known"
    )
    raise ConfigError(_FIELD, problem, fix=_LEAVE_OUT)


@dataclass
class Taps:
    """Taps on layers, which compute per-sample gradients from inputs and outputs during the backward pass.

    Attributes:
        table: (rows, parameters) float32 (float64 where the adapters are), filled by ``backward``.
        layout: layout of its columns.
        names: names of the pairs, for messages.
        tokens: number of tokens of each row.
    """

    table: torch.Tensor = field(repr=False)
    layout: Layout
    names: Sequence[str]
    tokens: int
    _lowest: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)
    _tapped: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)
    _filled: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)
    _is_backward: bool = field(default=False, init=False, repr=False)

    def tap(
        self, pair: int, weight: int, inputs: torch.Tensor, output: torch.Tensor, tokens: int | None = None
    ) -> torch.Tensor:
        """Watch ``output`` = W ``inputs`` of one weight of a pair, each as ``by_row`` takes it.

        Args:
            tokens: number of tokens of a row that this layer sees, if not all: 1 for a head.

        Returns: the output to go on with in place of ``output``.

        Raises: ConfigError naming a layer that runs twice, or whose rows are not the batch's.
        """
        again = self._is_backward  # a checkpointed layer runs again, for the tensors that it did not keep
        if (pair, weight) in self._tapped and not again:
            raise self._refusal(pair, "ran twice in one forward pass")
        self._tapped.add((pair, weight))
        rows, name, tokens = len(self.table), self.names[pair], self.tokens if tokens is None else tokens
        kept = by_row(inputs.detach(), rows, tokens, name).to(output.dtype)  # as it was multiplied
        if not inputs.requires_grad:
            output.requires_grad_()
            if not again:
                self._lowest.append(output)  # whatever else is tapped lies above one of these

        def fill(gradient: torch.Tensor, kept: torch.Tensor) -> None:
            # In the table's dtype, whatever the forward pass ran in.
            into = self.layout.weight(self.table, pair, weight)
            torch.bmm(by_row(gradient, rows, tokens, name).to(into.dtype).mT, kept.to(into.dtype), out=into)
            self._filled.add((pair, weight))

        tapped: torch.Tensor = Tap.apply(output, kept, fill)
        return tapped

    def backward(self, losses: torch.Tensor) -> None:
        """Fill the table from (rows,) losses.

        Raises: ConfigError naming a layer that took no part, whose columns would be what the memory last held.
        """
        for pair, shapes in enumerate(self.layout.shapes):
            if any((pair, weight) not in self._tapped for weight in range(len(shapes))):
                raise self._refusal(pair, "took no part in the forward pass")
        if not self._lowest:
            problem = "every adapted layer's input requires a gradient already"
            raise ConfigError("model", problem, fix="leave out enable_input_require_grads()")
        self._is_backward = True
        try:
            torch.autograd.grad(losses.sum(), self._lowest)
        finally:
            # Their taps hold these taps: a circle that Python's collector leaves for hundreds of steps, with the
            # activations of each.
            self._lowest.clear()
        if self._filled != self._tapped:
            pair, _ = min(self._tapped - self._filled)
            raise self._refusal(pair, "got no gradient: nothing of the loss depends on it")

    def _refusal(self, pair: int, problem: str) -> ConfigError:
        return ConfigError(_FIELD, f"layer {self.names[pair]} {problem}", fix=_LEAVE_OUT)


class Tap(torch.autograd.Function):
    """Passes a layer's output on, and on the way back hands its gradient, with the layer's input, to a function.

    The input is one of autograd's saved tensors, so that a checkpointed layer does not keep it: it is computed again.
    """

    @staticmethod
    def forward(context: Any, output: torch.Tensor, inputs: torch.Tensor, fill: Callable[..., None]) -> torch.Tensor:
        """The output unchanged."""
        context.save_for_backward(inputs)
        context.fill = fill
        return output.detach()

    @staticmethod
    def backward(context: Any, *of_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient unchanged."""
        (inputs,) = context.saved_tensors
        context.fill(of_output[0], inputs)
        return of_output[0], None, None


def per_sample_gradients(
    model: Any,
    pairs: Sequence[Block],
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    owners: torch.Tensor | None,
    units: int,
    *,
    autocast: torch.dtype | None = None,
    checkpointing: bool = False,
) -> PairGradients:
    """Gradients of each unit's loss. Private.

    A unit's loss is the sum of its rows' losses (one row for a record, up to m for a unit that has many).

    Args:
        model: the PEFT model.
        pairs: the result of ``lora_pairs(model)``, or of ``trained_blocks(model)``.
        input_ids: (rows, tokens), rows > 0.
        mask: (rows, tokens), as ``losses.model_losses`` takes it.
        owners: (rows,) index of each row's unit; ``units`` for a row that only fills the batch. None: row j is unit j.
        units: number of units in this micro-batch.
        autocast: run the forward pass in this dtype; gradients, norms and clipping stay float32.
        checkpointing: keep the inputs of transformer layers alone, and run each layer again on the way back.
    """
    layout = Layout.of(pairs)
    dtype = torch.promote_types(torch.float32, pairs[0].parameters[0].dtype)  # adapters are held in float32 at least
    table = torch.empty(len(input_ids), sum(layout.sizes), dtype=dtype, device=input_ids.device)
    taps = Taps(table, layout, [pair.name for pair in pairs], input_ids.shape[1])
    device = input_ids.device.type
    with _tap_layers(pairs, taps), checkpointed(model, enabled=checkpointing):
        with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
            losses = model_losses(model, input_ids, mask)
        taps.backward(losses)
    return by_unit(taps.table, layout, losses.detach(), counted_tokens(mask), owners, units)


def by_unit(
    table: torch.Tensor,
    layout: Layout,
    losses: torch.Tensor,
    tokens: torch.Tensor,
    owners: torch.Tensor | None,
    units: int,
) -> PairGradients:
    """The rows of a table added up by their owners, as ``per_sample_gradients`` says; the table is overwritten."""
    if owners is None:
        return PairGradients.of_table(table[:units], layout, losses[:units], tokens[:units])
    rows = _sum_by_owner(torch.ones_like(losses)[:, None], owners, units)
    of_units = _sum_by_owner(losses[:, None], owners, units) / rows
    tokens = _sum_by_owner(tokens[:, None], owners, units)[:, 0]
    return PairGradients.of_table(_sum_by_owner(table, owners, units), layout, of_units[:, 0], tokens)


def _sum_by_owner(rows: torch.Tensor, owners: torch.Tensor, units: int) -> torch.Tensor:
    return rows.new_zeros(units + 1, rows.shape[1]).index_add_(0, owners, rows)[:units]


@contextmanager
def _tap_layers(pairs: Sequence[Block], taps: Taps) -> Iterator[None]:
    """Tap every A and B, and every layer of a head, that runs inside the context."""

    def hook(pair: int, weight: int, tokens: int | None) -> Any:
        def run(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            output = taps.tap(pair, weight, inputs[0], output, tokens)
            if layer.bias is not None:
                output = taps.tap(pair, weight + 1, torch.ones_like(inputs[0][..., :1]), output, tokens)
            return output

        return run

    handles = []
    for number, pair in enumerate(pairs):
        if isinstance(pair, LayerModules):
            raise TypeError(f"layer {pair.name} trains its own weights, whose gradients layer_gradients computes")
        weight, tokens = 0, 1 if isinstance(pair, HeadModules) else None
        for layer in pair.layers:
            handles.append(layer.register_forward_hook(hook(number, weight, tokens)))
            weight += 1 if layer.bias is None else 2
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
