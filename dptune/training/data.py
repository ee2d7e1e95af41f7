"""Records as token ids, grouped into units of privacy, and the Poisson batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.training.losses import CONTEXT, COUNTED, PADDING


@dataclass(frozen=True)
class Tokens:
    """Token ids of every record: one record is one example, truncated and never chunked. Private.

    Attributes:
        rows: one int32 array for each record, with the end-of-text token if it fits; a list, or rows of a file
            (``token_file.MappedRows``). Never changed in place. A token that is read but has no loss, such as a
            prompt's, is stored as ``~id``, which is negative (``with_context``): ids and loss mask cannot get
            separated, and code that takes rows for plain ids fails instead of training on prompts.
        padding: token id that fills the right-hand side of a batch.
        width: width of the widest batch in tokens, longer than any record, whatever records it holds.
        truncated: number of records that were longer than the limit.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from dptune.training.data import Tokens
        >>> tokens = Tokens([np.array([5, 6, 2], np.int32), np.array([7, 2], np.int32)], padding=0, width=5)
        >>> ids, _ = tokens.batch(np.array([0, 1]), torch.device("cpu"))
        >>> ids.tolist()
        [[5, 6, 2, 0, 0], [7, 2, 0, 0, 0]]
    """

    rows: Sequence[NDArray[np.int32]] = field(repr=False)
    padding: int
    width: int
    truncated: int = 0

    def batch(
        self,
        indices: NDArray[np.int64],
        device: torch.device,
        *,
        height: int | None = None,
        width: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask of these records, both (height, width), padded on the right.

        The mask holds ``losses.PADDING``, ``COUNTED`` or ``CONTEXT`` for every position.

        The shape follows from public settings and a unit's own length (``by_width``), and at least one position is
        always padding, because kernels round differently by shape and by whether there is padding: with a shape
        that followed the batch, one record would move the gradients of all others by up to half a percent in
        bfloat16, beyond what clipping bounds.

        Args:
            height: rows in all, at least as many as indices; None takes their number. Rows beyond them hold one
                token and have no loss.
            width: tokens, more than any of these records has; None takes ``self.width``.
        """
        chosen = [self.rows[index] for index in indices]
        height = len(chosen) if height is None else height
        width = self.width if width is None else width
        ids = np.full((height, width), self.padding, dtype=np.int64)
        mask = np.full((height, width), PADDING, dtype=np.int64)
        mask[len(chosen) :, 0] = COUNTED
        for position, row in enumerate(chosen):
            ids[position, : len(row)] = plain_ids(row)
            mask[position, : len(row)] = np.where(row < 0, CONTEXT, COUNTED)
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def compact(self, indices: NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Like ``batch``, cut to the longest of these records: for evaluation and public data only."""
        ids, mask = self.batch(indices, device)
        longest = max(len(self.rows[index]) for index in indices)
        return ids[:, :longest], mask[:, :longest]

    @property
    def without_loss(self) -> int:
        """Number of records without a token in the loss, such as a prompt that fills the whole width. Private.

        Such records are drawn like all others; their gradient is zero. Reads every row.
        """
        return sum(not (row[1:] >= 0).any() for row in self.rows)


def with_context(ids: NDArray[np.int32], counts: NDArray[np.bool_]) -> NDArray[np.int32]:
    """A row of ``Tokens`` from plain ids and, for each, whether it counts in the loss."""
    return np.where(counts, ids, ~ids)


def plain_ids(row: NDArray[np.int32]) -> NDArray[np.int32]:
    """The token ids of a row of ``Tokens``, whether they count in the loss or not."""
    return np.where(row < 0, ~row, row)


def tokenize(texts: list[str], tokenizer: Any, max_length: int) -> Tokens:
    """Encode every text, followed by the end-of-text token, at most ``max_length - 1`` tokens.

    The last position stays padding, see ``Tokens.batch``. A corpus that is too large for a list goes through
    ``token_file.open_or_tokenize``.

    Raises: ConfigError if ``max_length`` leaves nothing to predict.
    """
    rows, cut = encode(texts, tokenizer, max_length)
    return Tokens(rows=rows, padding=tokenizer.pad_token_id, width=max_length, truncated=int(cut.sum()))


def encode(texts: list[str], tokenizer: Any, max_length: int) -> tuple[list[NDArray[np.int32]], NDArray[np.bool_]]:
    """The rows of ``tokenize``, and (texts,) whether each was cut. Raises ConfigError as ``tokenize`` does."""
    if max_length < 3:
        raise ConfigError("training.max_length", f"{max_length} is below 3", fix="allow at least three tokens")
    end = tokenizer.eos_token_id
    encoded = open_ids(texts, tokenizer)
    rows = [np.asarray([*ids, end][: max_length - 1], dtype=np.int32) for ids in encoded]
    return rows, np.array([len(ids) + 1 > max_length - 1 for ids in encoded], dtype=bool)


def open_ids(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of each text, with the beginning-of-text token where the tokenizer puts one, but without an end."""
    if not texts:
        return []
    end = tokenizer.eos_token_id
    found = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    return [list(ids[:-1] if len(ids) > 1 and ids[-1] == end else ids) for ids in found]


def by_width(
    batch: list[NDArray[np.int64]], tokens: Tokens, widths: Sequence[int]
) -> Iterator[tuple[int, list[NDArray[np.int64]]]]:
    """The units of a drawn batch by the width that their longest record needs, widest first.

    A unit's width follows from its own drawn records and public widths alone, so that no unit changes the shape in
    which another's gradient is computed.

    Args:
        widths: descending; the first is more than any record has.
    """
    longest = [max(len(tokens.rows[record]) for record in unit) for unit in batch]
    needed = [min(width for width in widths if width > length) for length in longest]
    for width in widths:
        if units := [unit for unit, own in zip(batch, needed, strict=True) if own == width]:
            yield width, units
