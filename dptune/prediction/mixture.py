"""Mixture of the models' laws: the weights lambda, the output law of one token, and draws from it.

Draws reveal neither the branch nor the slot. The weights bound how far private distributions pull away from the public
one, for all models at once.

A weight is the largest found for which the bound holds when it is evaluated again in float64, so that it always lies on
the private side. Whatever cannot be evaluated (NaN, infinities, a token that only the private model can say) gets
weight 0. Private: the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

#: Log-probability (of about 1e-300) below which a token counts as impossible;
#: ``dptune.prediction.mixture.truncate_laws`` has dropped far likelier tokens before.
_IMPOSSIBLE = -690.0
#: Distance kept from the limit, for rounding in sums over a vocabulary: as a share of the limit, and its least value.
_MARGIN, _LEAST_MARGIN = 1e-9, 1e-14
_NOTHING = 1e-300
_CLOSE = 1e-6
_NARROW = 1e-12
_MOST_ROUNDS = 100
#: Number of rounds if time must not depend on the data: enough for a relative error of 1e-6 in nearly all cases.
_STEADY_ROUNDS = 24
#: Largest number of float64 values that one pass keeps: on a CPU what its caches hold, which took a third of the time.
_MOST_VALUES, _MOST_ON_CPU = 1 << 24, 1 << 16

Rows = slice | torch.Tensor


def renyi_weights(
    log_public: torch.Tensor,
    log_private: torch.Tensor,
    order: float,
    excess: torch.Tensor | float,
    share: float = 1.0,
    *,
    steady: bool = False,
) -> torch.Tensor:
    """The largest l in [0, 1] with E_order <= 1 + ``excess`` in both directions, of p0 + share l (p - p0) and p0.

    E_order is exp((order - 1) D_order): the excess of a Renyi radius r is expm1((order - 1) r).

    Args:
        log_public: (..., vocabulary) log-probabilities of p0.
        log_private: (models, ..., vocabulary) log-probabilities of each p.
        order: the Renyi order, above 1.
        excess: a number, or one for each of (models, ...).
        share: the part of the law that the model may move at all, in (0, 1].
        steady: always do the same number of rounds, so that time reveals nothing about the distributions.

    Returns: (models, ...) weights in float64.
    """

    def weights(public: torch.Tensor, gain: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        def excess_at(weight: torch.Tensor, rows: Rows) -> torch.Tensor:
            step = torch.log1p(share * weight[:, None] * gain[rows])
            forward = (public[rows] * torch.expm1(order * step)).sum(-1)
            backward = (public[rows] * torch.expm1((1 - order) * step)).sum(-1)
            return torch.maximum(forward, backward)

        return _largest(excess_at, limit, steady)

    return _by_rows(log_public, log_private, excess, weights)


def pointwise_weights(log_public: torch.Tensor, log_private: torch.Tensor, radius: float) -> torch.Tensor:
    """The largest l in [0, 1] with |log(1 + l (p / p0 - 1))| <= ``radius`` at every token: order infinity of Renyi.

    Args: as for ``renyi_weights``.

    Returns: (models, ...) weights in float64.
    """

    def weights(public: torch.Tensor, gain: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        most, least = gain.amax(-1).clamp(min=_NOTHING), (-gain).amax(-1).clamp(min=_NOTHING)
        return torch.minimum(torch.expm1(limit) / most, -torch.expm1(-limit) / least).clamp(0.0, 1.0)

    return _by_rows(log_public, log_private, radius, weights)


def moment_weights(
    log_public: torch.Tensor,
    log_private: torch.Tensor,
    order: int,
    excess: float,
    share: float,
    *,
    steady: bool = False,
) -> torch.Tensor:
    """The weights where p may become any other distribution p' of which the same is known.

    Each is the largest l with sum over k = 2..order of C(order, k) (1-u)^(1-k) (2 u l)^k m_k <= ``excess``, where
    m_k = sum |p - p0|^k / p0^(k-1) and u is ``share``. Proof: expand E_order of the part that the slot moves in the
    difference d of both laws, over a floor of (1-u) p0; the sum over tokens of |d|^k p0^(1-k) is bounded by
    Minkowski's inequality, and t^k is convex, so that both laws' shares average.
    """
    powers = torch.arange(2, order + 1, dtype=torch.float64, device=log_private.device)
    factors = [math.log(math.comb(order, k)) + (1 - k) * math.log1p(-share) for k in range(2, order + 1)]
    scale = torch.tensor(factors, dtype=torch.float64, device=log_private.device) + powers * math.log(2 * share)

    def weights(public: torch.Tensor, gain: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        size = gain.abs().clamp(min=_NOTHING).log()  # log(0) takes longer, so time would reveal an empty slot
        terms = torch.stack([torch.logsumexp(public.log() + k * size, -1) for k in powers], -1) + scale

        def excess_at(weight: torch.Tensor, rows: Rows) -> torch.Tensor:
            return (terms[rows] + powers * weight.log()[:, None]).exp().sum(-1)

        return _largest(excess_at, limit, steady)

    return _by_rows(log_public, log_private, excess, weights)


def _by_rows(
    log_public: torch.Tensor,
    log_private: torch.Tensor,
    excess: torch.Tensor | float,
    weights: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Apply ``weights(p0, p / p0 - 1, limit)`` to rows of the vocabulary, as many as fit at a time."""
    if log_public.shape != log_private.shape[1:]:
        shapes = f"{tuple(log_public.shape)} and {tuple(log_private.shape)}"
        raise ValueError(f"the vocabularies or positions of the models differ: {shapes}")
    shape, vocabulary = log_private.shape[:-1], log_private.shape[-1]
    public = log_public.expand(log_private.shape).reshape(-1, vocabulary)
    private = log_private.reshape(-1, vocabulary)
    limits = torch.as_tensor(excess, dtype=torch.float64, device=private.device).expand(shape).reshape(-1)
    height = max(1, (_MOST_ON_CPU if private.device.type == "cpu" else _MOST_VALUES) // vocabulary)
    found = []
    for start in range(0, len(private), height):
        rows = slice(start, start + height)
        found.append(_safely(public[rows].double(), private[rows].double(), limits[rows], weights))
    return torch.cat(found).reshape(shape) if found else limits.reshape(shape)


def _safely(
    log_public: torch.Tensor,
    log_private: torch.Tensor,
    limits: torch.Tensor,
    weights: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    # Normalise again: float32 laws sum to 1 + 1e-7.
    log_public, log_private = log_public.log_softmax(-1), log_private.log_softmax(-1)
    possible = log_public > _IMPOSSIBLE
    only_private = (~possible & (log_private > _IMPOSSIBLE)).any(-1)
    unknown = (log_public.isnan() | log_private.isnan()).any(-1)
    public = torch.where(possible, log_public.exp(), 0.0)
    gain = torch.where(possible, torch.expm1(log_private - log_public), 0.0)
    found = weights(public, gain, limits - (limits * _MARGIN).clamp(min=_LEAST_MARGIN))
    return torch.where(only_private | unknown, 0.0, found)


def _largest(
    excess_at: Callable[[torch.Tensor, Rows], torch.Tensor], limit: torch.Tensor, steady: bool
) -> torch.Tensor:
    """The largest weights in [0, 1] found with ``excess_at(weights, rows) <= limit``, for excesses that grow from 0.

    Brackets, with a guess by the power law through both ends; every third round halves the bracket whatever happens.
    Rows that are near enough are left alone, or, if ``steady``, computed with the others.
    """
    rows: Rows = slice(None)
    low, at_low = torch.zeros_like(limit), torch.zeros_like(limit)
    high = torch.ones_like(limit)
    at_high = excess_at(high, rows)
    low[at_high <= limit] = 1.0
    for turn in range(_STEADY_ROUNDS if steady else _MOST_ROUNDS):
        if not steady:
            near = (at_low >= limit * (1 - _CLOSE)) | (high - low <= _NARROW * high)
            rows = (~near).nonzero()[:, 0]
            if not len(rows):
                break
        bracket = low[rows], at_low[rows], high[rows], at_high[rows]
        guess = _halfway(bracket[0], bracket[2]) if turn % 3 == 2 else _power_law(*bracket, limit[rows])
        found = excess_at(guess, rows)
        inside = found <= limit[rows]  # not so for NaN
        low[rows], at_low[rows] = torch.where(inside, guess, bracket[0]), torch.where(inside, found, bracket[1])
        high[rows], at_high[rows] = torch.where(inside, bracket[2], guess), torch.where(inside, bracket[3], found)
    return low


def _power_law(
    low: torch.Tensor, at_low: torch.Tensor, high: torch.Tensor, at_high: torch.Tensor, limit: torch.Tensor
) -> torch.Tensor:
    """The t at which c t^k through both ends meets the limit, with k = 2 if ``low`` is 0. Where an excess is 0 or
    infinite, ``_halfway``.
    """
    power = torch.where(at_low > 0, (at_high / at_low).log() / (high / low).log(), 2.0)
    guess = high * (limit * (1 - _CLOSE / 2) / at_high) ** (1 / power)
    usable = at_high.isfinite() & guess.isfinite() & (guess > low) & (guess < high)
    return torch.where(usable, guess, _halfway(low, high))


def _halfway(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The geometric mean of both ends; a sixteenth of the high end while the low one is 0."""
    return torch.where(low > 0, (low * high).sqrt(), high / 16)


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
