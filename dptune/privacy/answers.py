"""What answers cost: tokens whose Renyi divergence is bounded at one order.

Renyi divergence grows with its order, so that a bound at one order holds at all lower ones, and adds up over tokens
that are asked for adaptively. Nothing is known at higher orders: the order of the least token decides.
"""

from __future__ import annotations

import math

from dptune.privacy.filters import budget_at, renyi_cost
from dptune.privacy.release import Composition, Release


def has_answers(composition: Composition) -> bool:
    """Whether a token is among the releases."""
    return any(release.noise in ("token", "unbounded_token") for release in composition)


def answers_epsilon(composition: Composition, delta: float) -> float:
    """Upper bound on epsilon at ``delta`` in (0, 1), at the least order of the tokens; Gaussian releases may be among
    them, any other costs infinity.
    """
    order = min((release.renyi[0] for release in composition if release.renyi), default=2.0)
    return approximate_epsilon(order, math.fsum(n * _cost(release, order) for release, n in composition.items()), delta)


def approximate_epsilon(order: float, renyi: float, delta: float) -> float:
    """Renyi to approximate DP (Canonne, Kamath and Steinke 2020, proposition 12), 0 at least."""
    return max(renyi - budget_at(order, 0.0, delta), 0.0)


def published_answers_epsilon(composition: Composition, delta: float) -> float:
    """What PMixED's theorem 5.1 claims: the Renyi epsilon that its radius was solved for, added up. NOT a bound."""
    claims = [(dict(release.claims), count) for release, count in composition.items()]
    if not claims:
        return 0.0
    if not all(claim.get("order", 0) > 1 and claim.get("renyi", 0) > 0 for claim, _ in claims):
        return math.inf
    order = min(claim["order"] for claim, _ in claims)
    return approximate_epsilon(order, math.fsum(count * claim["renyi"] for claim, count in claims), delta)


def _cost(release: Release, order: float) -> float:
    if release.renyi is not None:
        return release.renyi[1]
    if release.noise != "gaussian":
        return math.inf
    return renyi_cost(order, release.sample_rate, release.effective_noise_multiplier)
