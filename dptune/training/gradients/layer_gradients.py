"""Gradients of a model's own weights, layer by layer: each unit's norms, and sums weighted by unit.

A backward pass computes norms, and no gradient of a weight. Then each layer adds up its weights' gradients, each row
times the factor that the clipper gave its unit: from the inputs and output gradients of the first pass where these may
be kept, else from a second pass over the same activations. So no unit's gradient is ever held whole. A norm belongs to
what is added up: after one pass both are made of the same tensors, and what is added up is always refused where it has
other sizes by layer and row than the norms were made of. (Sizes do not see a sign: code that turns signs passes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from dptune.core.errors import ConfigError
from dptune.training.gradients.layer_kinds import (
    FIELD,
    LEAVE_OUT,
    Products,
    Units,
    gradient_parts,
    lookups,
    sizes_of,
    square_norms,
    trained_weights,
    within_float32,
)
from dptune.training.gradients.parameter_groups import LayerModules
from dptune.training.gradients.per_sample import Tap
from dptune.training.gradients.step_memory import checkpointed, same_kernels
from dptune.training.losses import counted_tokens, model_losses

#: Bytes of output gradients that may be kept for each trained weight. Plain training holds 16 for the weight, its
#: gradient and AdamW's two moments, and activations beside them; so this adds at most some 15 % to its memory.
_KEPT = 3
#: Share of its radius by which a clipper shrinks it, to cover the rounding of sums in float32. Measured, not proved:
#: docs/reference/trained_weights.md.
FLOAT32_MARGIN = 1e-3


@dataclass(frozen=True)
class _Part:
    """What one run of a layer adds to the gradient of one weight."""

    group: int
    weight: nn.Parameter
    gradient: Products | torch.Tensor


class LayerGradients:
    """Gradients of one micro-batch by layer, of which norms and weighted sums exist alone. Private.

    A unit with a norm that is not finite counts as all zeros, so that it cannot spread; see also ``within_float32``.

    Attributes:
        margin: share of its radius by which a clipper shrinks it.
    """

    margin = FLOAT32_MARGIN

    def __init__(
        self, layers: _Layers, of_rows: torch.Tensor, tokens: torch.Tensor, owners: torch.Tensor | None, units: int
    ) -> None:
        """Compute the norms, by a backward pass.

        Args:
            of_rows: (rows,) losses, with their graph.
            tokens: (rows,) number of tokens that count in each row's loss.
        """
        self._layers, self._units, self._count = layers, Units.of(owners, units, len(of_rows)), units
        self._kept: list[_Part] | None = [] if layers.may_keep else None
        self._graph = of_rows if self._kept is None else None
        squares = _Norms(layers, self._units)

        def take(parts: list[_Part]) -> None:
            squares.take(parts)
            if self._kept is not None:
                self._kept += parts

        layers.backward(of_rows, take, again=self._kept is None)
        norms, self._seen = torch.stack(squares.found(), dim=1).sqrt(), torch.stack(squares.seen)
        broken = ~torch.isfinite(norms).all(dim=1)
        self._broken = broken if bool(broken.any()) else None  # an accelerator waits here, once a micro-batch
        self._norms = norms[:units].masked_fill(broken[:units, None], 0.0)
        self._sizes = squares.sizes[:units].masked_fill(broken[:units, None], 0.0)
        sizes = self._units.sums(torch.ones_like(tokens))
        losses = self._units.sums(of_rows.detach().double()) / sizes
        self._losses, self._tokens = losses[:units].nan_to_num(0.0, 0.0, 0.0), self._units.sums(tokens)[:units].double()

    def norms(self) -> torch.Tensor:
        """(units, groups) float64 l2 norms, all weights of a group jointly."""
        return self._norms

    def losses(self) -> torch.Tensor:
        """(units,) float64 mean loss of each unit's records; 0 where it was not finite."""
        return self._losses

    def tokens(self) -> torch.Tensor:
        """(units,) float64 number of tokens that count in each unit's loss."""
        return self._tokens

    def matrix(self) -> torch.Tensor:
        """Whole gradients are never held. Raises: ConfigError naming the clippers that need them."""
        problem = "is not lora, and then no record's whole gradient is held, which adaclip, geoclip and clipper l1 need"
        raise ConfigError(FIELD, problem, fix="take a mechanism that needs norms alone, such as static, or train: lora")

    def weighted_sum(self, factors: torch.Tensor, *, keep: bool = False) -> list[torch.Tensor]:
        """The sum over units of factors[unit, group] * gradient, one flat vector for each group in its weights' dtype.

        It is added up in float32 (float64 where the weights are), with rounding as in plain training, which ``margin``
        covers: in float64 it would take 1.1 to 1.4 times the step on a busy CPU, and far more on an accelerator with
        float64 at a small part of its rate. Factors are those ``within_float32``.

        Args:
            factors: (units, groups), finite.
            keep: keep what it is made of, for another sum.

        Raises: ConfigError where what is added up is not what the norms are of: where sizes by layer and row differ in
            the last digit of float64. In two passes kernels may add up in any order; after one, code may have written
            into what is kept, which torch does not always count (kernels of others, ``.data``).
        """
        whole = factors.new_zeros(self._units.count, factors.shape[1])
        whole[: self._count] = within_float32(factors, self._norms, self._sizes)
        if self._broken is not None:
            whole[self._broken] = 0.0
        sums = _Sums(self._layers, self._units, whole, self._broken)
        if self._graph is not None:
            self._layers.backward(self._graph, sums.take, again=keep)
            self._graph = self._graph if keep else None
        elif self._kept:
            left = self._kept if not keep else list(self._kept)
            while left:
                sums.take([left.pop(0)])
        else:
            raise RuntimeError("the sum was made already, and nothing of the pass is kept")
        self._check_same(torch.stack(sums.seen), sums.groups)
        return sums.totals

    def _check_same(self, again: torch.Tensor, groups: list[int]) -> None:
        """Refuse what was added up if its (parts, rows) sizes are not those that the norms were made of."""
        # NaN is equal to NaN alone: a row whose gradient was zero in the first pass may not be NaN in the second.
        before, after = (sizes.nan_to_num(-1.0, posinf=torch.inf) for sizes in (self._seen, again))
        if torch.equal(before, after):
            return
        if self._kept is not None:
            number = groups[int((before != after).any(dim=1).nonzero()[0])]
            raise self._layers.refusal(number, "had its input or gradient overwritten")
        problem = "needs two passes over each batch here, and the second gave other gradients than the first"
        fix = "lower training.physical_batch_size (in tune: rows) until one pass does, or train on a CPU"
        if self._layers.checkpointing:
            fix = f"leave gradient_checkpointing out, and {fix}"
        raise ConfigError(FIELD, problem, fix=fix)


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
) -> LayerGradients:
    """Gradients of each unit's loss by the weights of ``groups``. Private. Arguments as ``per_sample_gradients`` has.

    Activations, or what is kept of them, live until the first ``weighted_sum``.

    Args:
        groups: the result of ``layer_groups(model)``.

    Raises: ConfigError naming a layer whose rows are not the batch's, or that takes no part; also where torch may round
        products to fewer digits than float32 has.
    """
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        problem = f"adds gradients up in float32, and torch rounds products further (matmul precision {precision})"
        raise ConfigError(FIELD, problem, fix="call torch.set_float32_matmul_precision('highest'), or set it to lora")
    layers = _Layers(model, groups, len(input_ids), input_ids.shape[1], checkpointing)
    with layers.tapped(), torch.autocast(input_ids.device.type, dtype=autocast, enabled=autocast is not None):
        losses = model_losses(model, input_ids, mask)
    return LayerGradients(layers, losses, counted_tokens(mask), owners, units)


@dataclass
class _Layers:
    """The layers that train, tapped: each run of one hands its parts to a function.

    Attributes:
        rows, tokens: shape of the batch.
        checkpointing: whether transformer layers run again on the way back.
        dtype: of tables and sums.
        runs: how often the layers of each group ran.
        bytes: size of all their output gradients.
        lowest: outputs below which nothing trains; every tapped output lies above one of them.
    """

    model: Any
    groups: Sequence[LayerModules]
    rows: int
    tokens: int
    checkpointing: bool
    dtype: torch.dtype = field(init=False)
    runs: list[int] = field(init=False)
    bytes: int = field(default=0, init=False)
    lowest: list[torch.Tensor] = field(default_factory=list, init=False)
    _ran: set[int] = field(default_factory=set, init=False)
    _take: Callable[[list[_Part]], None] | None = field(default=None, init=False)
    _taking: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.runs = [0] * len(self.groups)
        self.dtype = torch.promote_types(torch.float32, self.groups[0].parameters[0].dtype)

    @property
    def may_keep(self) -> bool:
        """Whether all parts may be kept after a backward pass, in place of all activations."""
        return not self.checkpointing and self.bytes <= _KEPT * sum(group.size for group in self.groups)

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Context in which the layers are tapped, and checkpointed if they are to be."""
        with ExitStack() as stack:
            stack.enter_context(checkpointed(self.model, enabled=self.checkpointing))
            for number, group in enumerate(self.groups):
                for layer in group.modules:
                    if isinstance(layer, nn.Embedding):
                        stack.enter_context(lookups(layer, partial(self._tap, number, layer)))
                    else:
                        handle = layer.register_forward_hook(partial(self._hook, number), with_kwargs=True)
                        stack.callback(handle.remove)
            yield

    def backward(self, losses: torch.Tensor, take: Callable[[list[_Part]], None], *, again: bool) -> None:
        """Hand the parts of every run to ``take``, from (rows,) losses.

        Args:
            again: whether there will be another pass over the same activations.

        Raises: ConfigError naming a layer that took no part in the forward pass.
        """
        for number, group in enumerate(self.groups):
            if any(id(layer) not in self._ran for layer in group.modules):
                raise self.refusal(number, "took no part in the forward pass")
        self._take = take
        try:
            with self.tapped() if self.checkpointing else nullcontext(), same_kernels(enabled=not self.may_keep):
                torch.autograd.grad(losses.sum(), self.lowest, retain_graph=again)
        finally:
            self._take = None
            if not again:
                self.lowest.clear()

    def refusal(self, number: int, problem: str) -> ConfigError:
        """The error for a group."""
        return ConfigError(FIELD, f"layer {self.groups[number].name} {problem}", fix=LEAVE_OUT)

    def _hook(self, number: int, layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        if self._taking:
            return output  # run again for its weights' gradients alone
        given = (*args, *named.values())
        if len(given) != 1 or not all(isinstance(one, torch.Tensor) for one in (*given, output)):
            raise self.refusal(number, "takes or gives something else than one tensor")
        return self._tap(number, layer, given[0], output)

    def _tap(self, number: int, layer: nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Watch one run of a layer. Returns: the output to go on with."""
        if isinstance(layer, nn.Embedding) and inputs.dim() == 2 and len(inputs) == 1:
            # Positions that all rows share: each row has its own gradient of them.
            inputs, output = inputs.expand(self.rows, -1), output.expand(self.rows, -1, -1)
        if self._take is None:  # else a checkpointed layer runs again
            self.runs[number] += 1
            self.bytes += output.numel() * output.element_size()
            self._ran.add(id(layer))
            if not inputs.requires_grad:
                self.lowest.append(output)
        kept = self._by_row(number, inputs.detach())
        if isinstance(layer, nn.Linear | Conv1D):
            kept = kept.to(output.dtype)  # as it was multiplied

        def fill(gradient: torch.Tensor, kept: torch.Tensor) -> None:
            assert self._take is not None
            weights, self._taking = trained_weights(layer), True
            try:
                parts = gradient_parts(layer, kept, self._by_row(number, gradient), self.dtype)
            finally:
                self._taking = False
            self._take([_Part(number, weights[name], part) for name, part in parts.items()])

        tapped: torch.Tensor = Tap.apply(output, kept, fill)
        return tapped

    def _by_row(self, number: int, states: torch.Tensor) -> torch.Tensor:
        """(rows, ...) states of a layer, which may have come as (rows * tokens, width), row after row.

        Raises: ConfigError naming the layer, for what would be multiplied into other records' gradients.
        """
        if states.dim() == 2 and len(states) == self.rows * self.tokens:
            return states.unflatten(0, (self.rows, self.tokens))
        if states.dim() >= 2 and len(states) == self.rows:
            return states
        shape, batch = tuple(states.shape), f"{self.rows} rows of {self.tokens} tokens"
        raise self.refusal(number, f"saw a tensor of shape {shape} for {batch}, so no record's part of it is known")


class _Norms:
    """Takes a first pass: squared norms of each group, made when all of its layers' runs are there."""

    def __init__(self, layers: _Layers, units: Units) -> None:
        self._layers, self._units = layers, units
        self._left = list(layers.runs)
        self._parts: list[dict[int, list[Products | torch.Tensor]]] = [{} for _ in layers.groups]
        self._squares: list[torch.Tensor | None] = [None] * len(layers.groups)
        #: Sizes by row of what the gradients are added up of, part by part, and (units, groups) their sums.
        self.seen: list[torch.Tensor] = []
        self.sizes = torch.zeros(units.count, len(layers.groups), dtype=torch.float64)

    def take(self, of_run: Sequence[_Part]) -> None:
        """Keep what the weights of a layer get from one run; compute norms after its group's last."""
        number = of_run[0].group
        parts = self._parts[number]
        for part in of_run:
            parts.setdefault(id(part.weight), []).append(part.gradient)
            self.seen.append(sizes_of(part.gradient))
            self.sizes = self.sizes.to(self.seen[-1].device)
            self.sizes[:, number] += self._units.sums(self.seen[-1])
        self._left[number] -= 1
        if not self._left[number]:
            of_group = self._layers.groups[number].parameters
            self._squares[number] = torch.stack([self._of_weight(number, weight) for weight in of_group]).sum(dim=0)
            parts.clear()

    def _of_weight(self, number: int, weight: nn.Parameter) -> torch.Tensor:
        uses = self._parts[number].get(id(weight), [])
        tables = [use for use in uses if isinstance(use, torch.Tensor)]
        products = [use for use in uses if isinstance(use, Products)]
        if bool(tables) == bool(products):
            raise self._layers.refusal(number, "shares a weight with a layer of another kind")
        if products:
            return square_norms(products, (weight.shape[0], weight.shape[1]), self._units)
        table = self._units.sums(torch.stack(tables).sum(dim=0))
        return torch.linalg.vector_norm(table, dim=1, dtype=torch.float64).square()

    def found(self) -> list[torch.Tensor]:
        """(units,) squared norms of each group. Raises: ConfigError naming a group without gradient."""
        for number, squares in enumerate(self._squares):
            if squares is None:
                raise self._layers.refusal(number, "got no gradient: nothing of the loss depends on it")
        return [squares for squares in self._squares if squares is not None]


class _Sums:
    """Takes a second pass: sums over rows of factor times gradient, one flat vector for each group."""

    def __init__(self, layers: _Layers, units: Units, factors: torch.Tensor, broken: torch.Tensor | None) -> None:
        """Start from zeros.

        Args:
            factors: (units, groups), those of rows that fill included.
            broken: (units,) units whose gradients are not finite; None if all are.
        """
        of_row = slice(None) if units.owners is None else units.owners
        self._layers, self._factors = layers, factors[of_row].to(layers.dtype)
        self._dead = None if broken is None else broken[of_row]
        #: Sizes by row as the first pass notes them, part by part, and the group of each part.
        self.seen: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.totals = [
            torch.zeros(group.size, dtype=layers.dtype, device=group.parameters[0].device) for group in layers.groups
        ]

    def take(self, parts: Sequence[_Part]) -> None:
        """Add parts of a run."""
        for part in parts:
            factors, gradient = self._factors[:, part.group], part.gradient
            self.seen.append(sizes_of(gradient))
            self.groups.append(part.group)
            into = self._places(part.group)[id(part.weight)]
            if isinstance(gradient, Products):
                gradient.add_weighted_to(into.view(part.weight.shape), factors, self._dead)
            else:
                into += factors @ (gradient if self._dead is None else gradient.masked_fill(self._dead[:, None], 0.0))

    def _places(self, number: int) -> dict[int, torch.Tensor]:
        parameters = self._layers.groups[number].parameters
        views = self.totals[number].split([parameter.numel() for parameter in parameters])
        return {id(parameter): view for parameter, view in zip(parameters, views, strict=True)}
