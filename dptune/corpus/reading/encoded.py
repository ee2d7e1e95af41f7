"""What became of records as tokens, for the report of what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Encoded:
    """What became of the train records as tokens.

    Attributes:
        lengths: tokens of each record, after the cut.
        limit: the most tokens that a record may have.
        cut: records that were longer.
        without_loss: records none of whose tokens counts in the loss.
    """

    lengths: Sequence[int] = field(repr=False)
    limit: int
    cut: int
    without_loss: int
