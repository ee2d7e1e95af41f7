"""Gradients of one weight, unit by unit, as sums over tokens: their norms and weighted sums, never all of them at once.

A linear layer's gradient of one record is G^T A, a sum over tokens of outer products of the output's gradient with the
input. Its squared norm is the sum of all entries of (G G^T) * (A A^T): two matrices of tokens by tokens, where the
gradient itself has as many entries as the weight (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679).
Where texts are long and layers narrow, the gradient of a few units at a time is cheaper. An embedding's gradient is
such a sum too: of outer products with unit vectors, one for each looked-up row. So a weight with several uses (a tied
output layer, or a layer that runs twice) has the norm of the sum of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

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
    """(rows,) float64 sizes of what is added up: the norms of all tokens' outer products, or of a table's rows."""
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
    left, of_parts = (factors * norms).norm(dim=1, keepdim=True), (factors * sizes).norm(dim=1, keepdim=True)
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
