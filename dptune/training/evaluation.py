"""Losses of a model on records, and its token-level perplexity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.errors import ConfigError
from dptune.progress import progress
from dptune.training.data import Tokens
from dptune.training.losses import attention_mask, is_classifier, token_losses
from dptune.training.scores import score_classifier

_LARGEST_LOG = 700.0


def perplexity(model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None) -> float:
    """exp of ``mean_loss``, which says what the arguments are."""
    loss = mean_loss(model, tokens, rows, autocast=autocast)
    return math.exp(loss) if loss < _LARGEST_LOG else math.inf


def mean_loss(
    model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None, called: str = "these records"
) -> float:
    """Total negative log-likelihood (nats) over the number of predicted tokens that count, in eval mode.

    Of a classifier, that of the labels, over the number of records.

    An aggregate of the records: private if they are.

    Args:
        model: causal language model or classifier; its training mode is restored.
        tokens: the records.
        rows: physical batch size.
        autocast: dtype of the forward pass.
        called: what messages call the records.

    Raises: ConfigError if no token of any record counts.
    """
    if is_classifier(model):
        return score_classifier(model, tokens, rows, autocast=autocast).loss
    losses, counts = record_losses(model, tokens, rows, autocast=autocast)
    if not counts.sum():
        problem = f"leaves no token of {called} that counts in the loss"
        raise ConfigError("training.max_length", problem, fix="raise it, or give records with shorter prompts")
    return float(losses.sum() / counts.sum())


@torch.no_grad()
def record_losses(
    model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None, label: str = ""
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Each record's negative log-likelihood in nats, and its number of predicted tokens that count. Private.

    Args:
        model, tokens, rows, autocast: as ``mean_loss`` takes them.
        label: what the meter of progress says; empty shows none.

    Returns: (records,) losses and (records,) counts.
    """
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    found, counts = np.zeros(len(tokens.rows)), np.zeros(len(tokens.rows), dtype=np.int64)
    # Records of like length together: less padding, and the sum does not depend on the order.
    order = np.argsort([len(row) for row in tokens.rows], kind="stable")
    starts = range(0, len(order), rows)
    for start in progress(starts, label, total=len(starts)) if label else starts:
        chosen = order[start : start + rows]
        ids, mask = tokens.compact(chosen, device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(input_ids=ids, attention_mask=attention_mask(mask), use_cache=False).logits
        losses, valid = token_losses(logits, ids, mask)
        found[chosen] = losses.double().sum(dim=1).cpu().numpy()
        counts[chosen] = valid.sum(dim=1).cpu().numpy()
    for module, mode in modes:
        module.training = mode
    return found, counts
