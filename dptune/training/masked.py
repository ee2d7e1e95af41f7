"""The loss of an encoder that fills in masked tokens (Devlin et al. 2019, section 3.1), for its public pre-training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dptune.training.causal import evaluation_mode
from dptune.training.data import Tokens
from dptune.training.losses import attention_mask

#: Share of the tokens that are to be found, and of those the shares that are masked, or replaced by random ones.
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1
#: Ids below are special tokens, of which none is chosen.
_SPECIAL = 5


def masked_losses(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor, *, mask_token: int, draws: torch.Generator
) -> torch.Tensor:
    """(rows,) mean cross-entropy of each row's chosen tokens, of which the model sees masks or random tokens mostly.

    Args:
        model: a masked language model of transformers.
        input_ids, mask: (rows, tokens); special tokens have the ids below 5.
        mask_token: id of the token that stands for a masked one.
        draws: generator on the CPU of the choices.
    """
    chance = torch.rand(input_ids.shape, generator=draws).to(input_ids.device)
    fate = torch.rand(input_ids.shape, generator=draws).to(input_ids.device)
    other = torch.randint(_SPECIAL, model.config.vocab_size, input_ids.shape, generator=draws).to(input_ids.device)
    chosen = (chance < _CHOSEN) & (input_ids >= _SPECIAL) & (mask != 0)
    seen = torch.where(chosen & (fate < _MASKED), mask_token, input_ids)
    seen = torch.where(chosen & (fate >= 1 - _RANDOM), other, seen)
    states = model.roberta(input_ids=seen, attention_mask=attention_mask(mask)).last_hidden_state
    rows = chosen.nonzero()[:, 0]
    # The output layer at chosen positions alone, which are a seventh.
    losses = cross_entropy(model.lm_head(states[chosen]), input_ids[chosen], reduction="none")
    totals = losses.new_zeros(len(input_ids)).index_add(0, rows, losses)
    return totals / chosen.sum(dim=1).clamp(min=1)


@torch.no_grad()
def masked_perplexity(model: Any, tokens: Tokens, mask_token: int, rows: int, seed: int) -> float:
    """exp of the mean loss of chosen tokens, by one choice of ``seed``, each row weighted alike."""
    draws, found = torch.Generator().manual_seed(seed), []
    device = next(model.parameters()).device
    with evaluation_mode(model):
        for start in range(0, len(tokens.rows), rows):
            ids, mask = tokens.compact(np.arange(start, min(start + rows, len(tokens.rows))), device)
            found.append(masked_losses(model, ids, mask, mask_token=mask_token, draws=draws))
    return math.exp(float(torch.cat(found).double().mean()))
