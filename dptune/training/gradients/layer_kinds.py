"""Layer kinds: which layers' own weights can train, and how each record's gradient follows from what the layer saw.

Of a layer's input and its output's gradient, both by record and token:

- linear layers, GPT-2's ``Conv1D`` (whose weight is transposed) and embeddings have gradients that are sums of outer
  products (``Products``);
- biases, layer norms and other layers with few weights have each row's gradient computed whole, in one small table.

Gradients of one weight, unit by unit, are never held all at once: only their norms and weighted sums are computed.

A linear layer's gradient of one record is G^T A, a sum over tokens of outer products of the output's gradient with the
input. Its squared norm is the sum of all entries of (G G^T) * (A A^T): two matrices of tokens by tokens, where the
gradient itself has as many entries as the weight (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679).
Where texts are long and layers narrow, the gradient of a few units at a time is cheaper. An embedding's gradient is
such a sum too: of outer products with unit vectors, one for each looked-up row. So a weight with several uses (a tied
output layer, or a layer that runs twice) has the norm of the sum of all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from dptune.core.errors import ConfigError


class Float64(TorchFunctionMode):
    """Puts float64 in the place of float32: norms, softmax and rotations of many models are made in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with float64 wherever it was told float32."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if one is torch.float32 else one for one in args]
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


FIELD = "train"
LEAVE_OUT = "leave this layer out: train layers by their names, without it"
#: A layer of no known kind may have so many weights: each row's gradient of them is computed whole.
_MOST_WEIGHTS = 1 << 17


def is_known(layer: nn.Module) -> bool:
    """Whether each record's gradient of the layer's weight is a sum over tokens of products of two vectors."""
    return isinstance(layer, nn.Linear | Conv1D | nn.Embedding)


def check_layer(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose weights' gradients cannot be told apart by record. Reads no data and computes nothing.

    Raises: ConfigError naming the layer.
    """
    if problem := _problem(layer):
        raise ConfigError(FIELD, f"layer {name} ({type(layer).__name__}) {problem}", fix=LEAVE_OUT)


def _problem(layer: Any) -> str:
    """Why the layer is refused; empty if it is not."""
    if isinstance(layer, _NormBase):
        return "normalises over all records of a batch, so that one record changes the others' gradients"
    if isinstance(layer, nn.Embedding):
        if layer.scale_grad_by_freq or layer.max_norm is not None:
            return "scales its gradients or weights by what all records of a batch look up"
        return "has sparse gradients" if layer.sparse else ""
    if is_known(layer):
        return ""
    trained = trained_weights(layer)
    named = ", ".join(trained)
    if any(True for child in layer.children() for _ in child.parameters()):
        return f"has weights of its own ({named}) beside the layers in it, and how it uses them is not known"
    needed = [
        one
        for one in inspect.signature(layer.forward).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) != 1:
        return f"computes with its weights ({named}) from {len(needed)} inputs, where one is supported"
    if sum(one.numel() for one in trained.values()) > _MOST_WEIGHTS:
        return f"is of no known kind, and has more than {_MOST_WEIGHTS} weights ({named})"
    return ""


def trained_weights(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The layer's own weights that train, without those of layers in it, by name."""
    return {name: one for name, one in layer._parameters.items() if one is not None and one.requires_grad}


def gradient_parts(
    layer: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype
) -> dict[str, Products | torch.Tensor]:
    """Each row's gradient of each of the layer's weights that trains.

    Args:
        inputs: (rows, ..., width) what the layer read; (rows, tokens) row numbers of an embedding.
        gradient: (rows, ..., width) the gradient of its output, or of an embedding's looked-up rows.
        dtype: of the tables.

    Returns: by the weight's name, outer products or a (rows, entries) table.
    """
    trained, parts = trained_weights(layer), dict[str, Products | torch.Tensor]()
    if isinstance(layer, nn.Embedding):
        if layer.padding_idx is not None:  # torch gives that row no gradient, and here no unit may have one
            gradient = gradient.masked_fill((inputs == layer.padding_idx)[..., None], 0.0)
        return {"weight": Products(inputs.flatten(1), _by_token(gradient))}
    is_norm = type(layer) is nn.LayerNorm and len(layer.normalized_shape) == 1
    if not (is_known(layer) or is_norm):
        return _tables(layer, trained, inputs, gradient, dtype)
    inputs, gradient = _by_token(inputs), _by_token(gradient)
    if "weight" in trained and type(layer) is nn.LayerNorm:
        seen = nn.functional.layer_norm(inputs.to(dtype), layer.normalized_shape, eps=layer.eps)
        parts["weight"] = (seen * gradient).sum(dim=1, dtype=dtype)
    elif "weight" in trained:
        swapped = isinstance(layer, Conv1D)  # its weight is (width in, width out)
        parts["weight"] = Products(inputs, gradient) if swapped else Products(gradient, inputs)
    if "bias" in trained:
        parts["bias"] = gradient.sum(dim=1, dtype=dtype)
    return parts


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """(rows, all positions, width)."""
    return states[:, None] if states.dim() == 2 else states.flatten(1, -2)


def _tables(
    layer: nn.Module, trained: dict[str, nn.Parameter], inputs: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype
) -> dict[str, Products | torch.Tensor]:
    """Each row's gradient of all weights of a layer of any kind, which is run again on each row by itself."""
    weights = {name: one.detach() for name, one in trained.items()}

    def of_row(row: torch.Tensor, back: torch.Tensor) -> dict[str, torch.Tensor]:
        pull: Any = vjp(lambda given: functional_call(layer, given, (row[None],)), weights)[1]
        found: dict[str, torch.Tensor] = pull(back[None])[0]
        return found

    # A backward pass forgets the mode that the forward pass ran in.
    with Float64() if dtype == torch.float64 else nullcontext():
        found = vmap(of_row)(inputs, gradient)
    return {name: table.flatten(1).to(dtype) for name, table in found.items()}


#: Numbers that may exist at a time beside the activations: some 32 MB in float64.
_AT_A_TIME = 1 << 22
#: What a product in float64 costs, over one in float32; and what each entry of a gradient costs to write and to read,
#: over one multiplication. Measured on a CPU; they decide on time alone.
_IN_FLOAT64, _OF_ENTRY = 2.0, 8.0
#: How far the parts of a unit's gradient may cancel: the ratio of their sizes to the norm of their sum. Made-up
#: texts on untrained models have 1 to 4. Rounding is a share of the parts: at 1e6 a unit moved a sum by 4 radii.
_MOST_CANCELLED = 100.0
#: A unit with a smaller factor counts as all zeros: near 1e-45 float32 rounds a factor up to twice what it is.
_LEAST_FACTOR = 1e-30


@contextmanager
def lookups(layer: nn.Embedding, tap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Context in which what an embedding looks up is tapped, with the row numbers that its own code computes."""
    own: Any = layer  # whose forward functions are set for a while
    forward, before = layer.forward, vars(layer).get("forward")

    def run(*args: Any, **named: Any) -> Any:
        with _Lookups(layer.weight, tap):
            return forward(*args, **named)

    own.forward = run
    try:
        yield
    finally:
        vars(layer).pop("forward", None)
        if before is not None:
            own.forward = before


class _Lookups(TorchFunctionMode):
    """Taps ``torch.nn.functional.embedding``: some embeddings shift the numbers, or scale what they looked up."""

    def __init__(self, weight: torch.Tensor, tap: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._weight, self._tap = weight, tap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, and tap it if it looks up rows of the weight."""
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.embedding and len(args) > 1 and args[1] is self._weight:
            return self._tap(args[0], output)
        return output


@dataclass(frozen=True)
class Products:
    """A row's gradient of a weight (L, R) as the sum over its tokens of the outer products of left and right.

    Attributes:
        left: (rows, tokens, L); or (rows, tokens) int64: numbers of the weight's rows, in place of unit vectors.
        right: (rows, tokens, R).
    """

    left: torch.Tensor
    right: torch.Tensor

    @property
    def looks_up(self) -> bool:
        """Whether ``left`` holds row numbers."""
        return not self.left.is_floating_point()

    def of(self, rows: Rows, dtype: torch.dtype) -> Products:
        """(units, tokens of all rows of a unit, ...) the products of these units."""
        left, right = _taken(self.left, rows), _taken(self.right, rows)
        return Products(left if self.looks_up else left.to(dtype), right.to(dtype))

    def add_to(self, gradients: torch.Tensor) -> None:
        """Add each unit's gradient to (units, L, R)."""
        if not self.looks_up:
            gradients.baddbmm_(self.left.mT, self.right)
            return
        units, length, width = gradients.shape
        places = self.left + torch.arange(units, device=self.left.device)[:, None] * length
        gradients.view(-1, width).index_add_(0, places.flatten(), self.right.flatten(0, 1))

    def add_weighted_to(self, total: torch.Tensor, factors: torch.Tensor, dead: torch.Tensor | None) -> None:
        """Add the rows' gradients, each times its factor, to (L, R).

        Args:
            factors: (rows,).
            dead: (rows,) rows of factor 0 whose gradients may not be finite; None if all are.
        """
        left, right = self.left, self.right.to(total.dtype)
        if dead is not None:  # 0 times infinity is NaN
            right = right.masked_fill(dead[:, None, None], 0.0)
            left = left if self.looks_up else left.masked_fill(dead[:, None, None], 0.0)
        factors = factors.to(total.dtype)[:, None, None]
        if self.looks_up:
            total.index_add_(0, left.flatten(), (right * factors).flatten(0, 1))
            return
        left = left.to(total.dtype)
        if left.shape[2] < right.shape[2]:
            left = left * factors
        else:
            right = right * factors
        total.addmm_(left.flatten(0, 1).T, right.flatten(0, 1))


#: Rows of some units: a slice where each unit has one row, in order; else (units, rows of a unit) numbers.
Rows = slice | torch.Tensor


def _taken(of_rows: torch.Tensor, rows: Rows) -> torch.Tensor:
    return of_rows[rows] if isinstance(rows, slice) else of_rows[rows].flatten(1, 2)


@dataclass(frozen=True)
class Units:
    """Which rows of a micro-batch each unit has. Rows that only fill the batch are units too, after the others.

    Attributes:
        count: number of units, those that fill included.
        owners: (rows,) number of each row's unit; None if row j is unit j.
    """

    count: int
    owners: torch.Tensor | None

    @classmethod
    def of(cls, owners: torch.Tensor | None, units: int, rows: int) -> Units:
        """From the owners that ``per_sample_gradients`` takes, where rows that fill have the owner ``units``."""
        if owners is None:
            return cls(rows, None)
        fills = owners == units
        return cls(units + int(fills.sum()), torch.where(fills, units + fills.cumsum(0) - 1, owners))

    def pieces(self, entries: int) -> Iterator[tuple[Rows, Rows]]:
        """Numbers of some units, with their rows, so that ``entries`` for each row are not too many at a time."""
        if self.owners is None:
            step = max(1, _AT_A_TIME // entries)
            for start in range(0, self.count, step):
                piece = slice(start, min(start + step, self.count))
                yield piece, piece
            return
        order, sizes = self.owners.argsort(stable=True), self.owners.bincount(minlength=self.count)
        starts = sizes.cumsum(0) - sizes
        for size in sizes.unique().tolist():
            units = (sizes == size).nonzero()[:, 0]
            places = starts[units][:, None] + torch.arange(size, device=order.device)
            step = max(1, _AT_A_TIME // max(1, entries * size))
            for start in range(0, len(units) if size else 0, step):
                yield units[start : start + step], order[places[start : start + step]]

    def sums(self, of_rows: torch.Tensor) -> torch.Tensor:
        """(units, ...) sums over each unit's rows of (rows, ...)."""
        if self.owners is None:
            return of_rows
        return of_rows.new_zeros(self.count, *of_rows.shape[1:]).index_add_(0, self.owners, of_rows)


def square_norms(uses: Sequence[Products], shape: tuple[int, int], units: Units) -> torch.Tensor:
    """(units,) float64: squared norm of each unit's gradient of a weight, summed over its rows and all uses.

    By Gram matrices they are exact but for float64's rounding, whatever cancels; by gradients in float32, a few units
    at a time, they are the norms of what float32 computes.
    """
    found = torch.zeros(units.count, dtype=torch.float64, device=uses[0].right.device)
    dense, tokens = sum(not use.looks_up for use in uses), sum(use.right.shape[1] for use in uses)
    length, width = shape
    grams = _IN_FLOAT64 * tokens**2 * (length * bool(dense) + width)
    whole = sum(use.right.shape[1] * width * (1 if use.looks_up else length) for use in uses)
    if grams <= whole + _OF_ENTRY * length * width:
        entries = tokens * (tokens + length * dense + width)
        for numbers, rows in units.pieces(entries):
            found[numbers] = _by_grams([use.of(rows, torch.float64) for use in uses])
        return found
    dtype = torch.promote_types(torch.float32, uses[0].right.dtype)
    for numbers, rows in units.pieces(length * width):
        parts = [use.of(rows, dtype) for use in uses]
        gradients = parts[0].right.new_zeros(len(parts[0].right), length, width)
        for part in parts:
            part.add_to(gradients)
        found[numbers] = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=torch.float64).square()
    return found


def sizes_of(part: Products | torch.Tensor) -> torch.Tensor:
    """(rows,) float64 sizes of what is added up: the norms of all tokens' outer products, or of a table's rows.

    In float32 (a twentieth of a step faster) squares overflow: a unit whose parts cancel moved a sum by 52 radii.
    """
    if not isinstance(part, Products):
        return torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
    norms = torch.linalg.vector_norm(part.right, dim=2, dtype=torch.float64)
    if not part.looks_up:
        norms = norms * torch.linalg.vector_norm(part.left, dim=2, dtype=torch.float64)
    return norms.sum(dim=1)


def within_float32(factors: torch.Tensor, norms: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Factors of units, so that a sum in float32 rounds each unit's part to a small share of it.

    All factors of a unit shrink by one number where its gradient is what is left of parts a hundred times its size, and
    become 0 where float32 cannot hold them. That follows from the unit alone, and no unit's part grows.

    Args:
        factors: (units, groups) as a clipper gives them.
        norms: (units, groups) of the gradients.
        sizes: (units, groups) of what they are added up of.

    >>> ones = torch.ones(3, 1, dtype=torch.float64)
    >>> within_float32(ones, ones, torch.tensor([[3.0], [100.0], [400.0]]).double()).flatten().tolist()
    [1.0, 1.0, 0.25]
    """
    left = (factors * norms).norm(dim=1, keepdim=True)
    of_parts = (factors * sizes).where(factors != 0, 0.0).norm(dim=1, keepdim=True)  # a size may be infinite
    share = (_MOST_CANCELLED * left / of_parts.clamp(min=1e-300)).clamp(max=1.0).where(of_parts > 0, 1.0)
    shrunk = factors * share
    return shrunk.masked_fill(shrunk.abs() < _LEAST_FACTOR, 0.0)


def _by_grams(uses: Sequence[Products]) -> torch.Tensor:
    """(units,) squared norms of sums of uses: each with itself, and every two of them twice."""
    total = torch.zeros(len(uses[0].right), dtype=torch.float64, device=uses[0].right.device)
    for number, use in enumerate(uses):
        total += _inner(use, use)
        for other in uses[:number]:
            total += 2 * _inner(use, other)
    # Not below the zero that rounding would leave of terms that cancel.
    return total.clamp(min=0.0)


def _inner(one: Products, other: Products) -> torch.Tensor:
    """(units,) inner products of two uses' gradients: sum over token pairs of (left . left) (right . right)."""
    if other.looks_up and not one.looks_up:
        one, other = other, one
    if not one.looks_up:
        lefts = one.left @ other.left.mT
    elif other.looks_up:
        lefts = (one.left[:, :, None] == other.left[:, None, :]).to(one.right.dtype)
    else:  # a unit vector's inner product is one entry
        picked = one.left[:, None, :].expand(-1, other.left.shape[1], -1)
        lefts = other.left.gather(2, picked).mT
    return (lefts * (one.right @ other.right.mT)).sum(dim=(1, 2))
