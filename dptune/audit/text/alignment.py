"""Alignment score: how far the released adapter moved along each candidate's own gradient.

Training adds up clipped gradients and noise, so that the sum of a unit's share is found best by its own direction: a
matched filter. The direction is known to whoever has the base model: the candidate's gradient at the adapter that the
run started from, at the released one, and halfway. What other candidates' coins and records like the public ones add is
held back as a filter against coloured noise does. The score is a function of the released adapter, of public data and
of the candidates, and of no coin, as the bounds from one run ask for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.training.data import Tokens
from dptune.training.gradients.parameter_groups import Block, trained_blocks
from dptune.training.gradients.per_sample import per_sample_gradients

_SHARES = (0.0, 0.5, 1.0)  # of the way from the run's start to the released adapter
_FAIR = 0.25  # variance of a fair coin


def alignment_scores(
    model: Any, released: Any, candidates: Tokens, public: Tokens, *, rows: int
) -> NDArray[np.float64]:
    """(candidates,) scores, larger if the candidate looks trained on. Private.

    Args:
        model: the base model with the adapter that the run started from, in evaluation mode. It is left as it was.
        released: the same model with the released adapter.
        candidates: one row each, as training would have read them.
        public: public records like the private ones.
        rows: physical batch size.

    Raises: ConfigError if the two models do not train the same weights.
    """
    pairs, known = trained_blocks(model), dict(released.named_parameters())
    names = {id(weight): name for name, weight in model.named_parameters()}
    weights = [weight for pair in pairs for weight in pair.parameters]
    if any(names[id(weight)] not in known for weight in weights):
        raise ConfigError("adapter", "trains other weights than the run started from", fix="attack the run's own")
    start = [weight.detach().clone() for weight in weights]
    end = [known[names[id(weight)]].detach().to(weight) for weight in weights]
    directions = common = torch.zeros((), device=weights[0].device)
    try:
        for share in _SHARES:
            _put(weights, [torch.lerp(*way, share) for way in zip(start, end, strict=True)])
            directions = directions + _directions(model, pairs, candidates, rows) / len(_SHARES)
            common = common + _directions(model, pairs, public, rows) / len(_SHARES)
    finally:
        _put(weights, start)
    moved = -torch.cat([(after - before).reshape(-1) for before, after in zip(start, end, strict=True)]).float()
    # Matched filter s = D K^-1 moved with K = I + D'D / 4 + P'P, by the Woodbury identity: K has a row a parameter.
    others = torch.cat([directions * _FAIR**0.5, common])
    gram = (others @ others.T).double()
    gram.diagonal().add_(1.0)
    inner = torch.linalg.solve(gram, (others @ moved).double())
    return ((directions @ moved).double() - (directions @ others.T).double() @ inner).cpu().numpy()


def _put(weights: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


def _directions(model: Any, pairs: list[Block], tokens: Tokens, rows: int) -> torch.Tensor:
    """(records, parameters) float32 gradients of each record, each of norm 1."""
    device, found = pairs[0].parameters[0].device, []
    for first in range(0, len(tokens.rows), rows):
        ids, mask = tokens.compact(np.arange(first, min(first + rows, len(tokens.rows))), device)
        table = per_sample_gradients(model, pairs, ids, mask, None, len(ids)).matrix()
        found.append(torch.nn.functional.normalize(table, dim=1).float())
    return torch.cat(found)
