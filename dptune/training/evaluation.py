"""Token-level perplexity of a model on a set of records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from dptune.errors import ConfigError
from dptune.training.data import Tokens
from dptune.training.losses import attention_mask, is_classifier, token_losses
from dptune.training.scores import score_classifier

_LARGEST_LOG = 700.0


def perplexity(model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None) -> float:
    """exp of ``mean_loss``, which says what the arguments are."""
    loss = mean_loss(model, tokens, rows, autocast=autocast)
    return math.exp(loss) if loss < _LARGEST_LOG else math.inf


@torch.no_grad()
def mean_loss(model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None) -> float:
    """Total negative log-likelihood (nats) over the number of predicted tokens that count, in eval mode.

    Of a classifier, that of the labels, over the number of records.

    An aggregate of the records: private if they are.

    Args:
        model: causal language model or classifier; its training mode is restored.
        tokens: the records.
        rows: physical batch size.
        autocast: dtype of the forward pass.

    Raises: ConfigError if no token of any record counts.
    """
    if is_classifier(model):
        return score_classifier(model, tokens, rows, autocast=autocast).loss
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total, count = 0.0, 0
    # Records of like length together: less padding, and the sum does not depend on the order.
    order = np.argsort([len(row) for row in tokens.rows], kind="stable")
    for start in range(0, len(order), rows):
        ids, mask = tokens.compact(order[start : start + rows], device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(input_ids=ids, attention_mask=attention_mask(mask), use_cache=False).logits
        losses, valid = token_losses(logits, ids, mask)
        total += float(losses.double().sum())
        count += int(valid.sum())
    for module, mode in modes:
        module.training = mode
    if not count:
        problem = "leaves no token of these records that counts in the loss"
        raise ConfigError("training.max_length", problem, fix="raise it, or give records with shorter prompts")
    return total / count
