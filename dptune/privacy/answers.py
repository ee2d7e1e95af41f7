"""The cost of answers: tokens whose Renyi divergence is bounded at one order.

Renyi divergence grows with its order, so a bound at one order holds at all lower ones. It adds up over tokens that are
asked for adaptively. Nothing is known at higher orders, so all tokens are priced at the lowest order among them.
"""

from __future__ import annotations

import math

from dptune.privacy.accounting.renyi_filter import budget_at, renyi_cost
from dptune.privacy.release import Composition, Release


def has_answers(composition: Composition) -> bool:
    """Whether a token is among the releases."""
    return any(release.noise in ("token", "unbounded_token") for release in composition)


def answers_epsilon(composition: Composition, delta: float) -> float:
    """Upper bound on epsilon at ``delta`` in (0, 1), at the lowest order of the tokens. Gaussian releases may be among
    them; any other release costs infinity.
    """
    order = min((release.renyi[0] for release in composition if release.renyi), default=2.0)
    return approximate_epsilon(order, math.fsum(n * _cost(release, order) for release, n in composition.items()), delta)


def approximate_epsilon(order: float, renyi: float, delta: float) -> float:
    """Convert Renyi to approximate DP (Canonne, Kamath and Steinke 2020, proposition 12); at least 0."""
    return max(renyi - budget_at(order, 0.0, delta), 0.0)


def published_answers_epsilon(composition: Composition, delta: float) -> float:
    """Epsilon by PMixED's theorem 5.1, which adds up the Renyi epsilons that its radius was solved for. NOT a bound."""
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
