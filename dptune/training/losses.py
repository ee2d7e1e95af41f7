"""One scalar loss per sequence, and token-level perplexity.

The hub classes' own ``labels=`` loss averages over all tokens of the padded batch, so that adding one record
rescales every other record's gradient and no clip radius bounds the change. Here each sequence is alone.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy


def token_losses(
    logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihoods of each next token.

    Args:
        logits: (rows, tokens, vocabulary); any float dtype, the loss is float32.
        input_ids: (rows, tokens).
        mask: (rows, tokens), 1 for real tokens; padding on the right.

    Returns: (rows, tokens - 1) losses, zero at padding, and the (rows, tokens - 1) mask.
    """
    targets, valid = input_ids[:, 1:], mask[:, 1:].bool()
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none")
    return losses.where(valid, 0.0), valid


def sequence_losses(logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows,): each sequence's mean loss over its own valid tokens; 0 for a sequence without a second token."""
    losses, valid = token_losses(logits, input_ids, mask)
    return losses.sum(dim=1) / valid.sum(dim=1).clamp(min=1)
