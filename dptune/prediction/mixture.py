"""The output law of one token, and draws from it that reveal neither the branch nor the slot."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

#: Least log-probability of a token that is kept. Draws have 52 bits, so such a token is drawn with a probability that
#: is right to a few parts in 10,000.
_RAREST = -40 * math.log(2)
#: Lower bounds on log-probabilities. ``_LEAST`` keeps out denormal numbers, which take longer to compute with. A
#: private law below ``_EMPTY`` on all kept tokens has no mass there.
_LEAST, _EMPTY = -600.0, -500.0


def truncate_laws(log_public: torch.Tensor, log_private: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both laws in float64 on the tokens to which the public one gives 2^-40 or more, renormalised.

    The set is public, so that this costs nothing. Without it a rare token could be proof of a private model: the public
    one covers it on paper, but no draw with 52 bits ever gives it. A private law with nothing on that set becomes the
    public one.
    """
    kept = log_public >= _RAREST
    public = torch.log_softmax(log_public.double().masked_fill(~kept, -math.inf), -1)
    private = log_private.double().clamp(min=_LEAST).masked_fill(~kept, -math.inf)
    total = private.logsumexp(-1, keepdim=True)
    return public, torch.where(total > _EMPTY, private - total, public)


def law(log_public: torch.Tensor, log_private: torch.Tensor, weights: torch.Tensor, slots: Slots) -> torch.Tensor:
    """The whole output law, for evaluations: P = w0 p0 + (1 - w0) / N * sum of [p0 + lambda_i (p_i - p0)].

    Args:
        log_public: (..., vocabulary).
        log_private: (models, ..., vocabulary), one for every slot.
        weights: (models, ...), the lambdas.

    Returns: (..., vocabulary) probabilities in float64.
    """
    parts = parts_of(weights, slots)
    public, total = log_public.double().exp(), torch.zeros_like(log_public, dtype=torch.float64)
    for part, private in zip(parts, log_private, strict=True):  # one model at a time: a vocabulary is large
        total += part[..., None] * private.double().exp()
    return total + (1 - parts.sum(0))[..., None] * public


def parts_of(weights: torch.Tensor, slots: Slots) -> torch.Tensor:
    """The share of the law that each private model gets, of the shape of ``weights``."""
    return weights * (1 - slots.public_weight) / slots.models


def token_at(probabilities: torch.Tensor, uniform: float) -> int:
    """The token at ``uniform`` in (0, 1), by the inverse of the cumulative sum in float64.

    Private up to the rounding of that arithmetic, as any sampler on a machine is.
    """
    cumulative = np.cumsum(probabilities.double().cpu().numpy())
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(token, len(cumulative) - 1)


# The fixed mixture: PMixed with a public weight that never moves, which is what makes it provable.


@dataclass(frozen=True)
class Slots:
    """The public constants of a fixed mixture.

    Attributes:
        models: N, the number of slots.
        public_weight: w0 in (0, 1), the least weight of the public model.
    """

    models: int
    public_weight: float

    @property
    def floor(self) -> float:
        """s: the weight of the part of the mixture that one slot can move."""
        return self.public_weight + (1 - self.public_weight) / self.models

    @property
    def share(self) -> float:
        """u: the slot's own weight within that part."""
        return (1 - self.public_weight) / self.models / self.floor

    def excess(self, rdp_per_token: float, order: float) -> float:
        """The amount by which E_order of that part may exceed 1: (e^((a-1) e) - 1) / s."""
        return math.expm1((order - 1) * rdp_per_token) / self.floor

    def radius(self, rdp_per_token: float, order: float) -> float:
        """The radius r*: the same bound as a Renyi divergence."""
        return math.log1p(self.excess(rdp_per_token, order)) / (order - 1)
