"""Lengths of records in tokens, for the report on what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenCounts:
    """How the train records fit into the model's rows. Private.

    Attributes:
        lengths: number of tokens of each record, after cutting.
        limit: the most tokens that a record may have.
        cut: number of records that were longer, and lost their end.
        without_loss: number of records none of whose tokens counts in the loss.
    """

    lengths: Sequence[int] = field(repr=False)
    limit: int
    cut: int
    without_loss: int
