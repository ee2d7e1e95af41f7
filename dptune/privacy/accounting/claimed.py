"""Who counts ``epsilon_published``, in words, and where Renyi DP has a claim beside it."""

from __future__ import annotations

import math

from dptune.privacy.accountants import Epsilons, rdp_epsilon
from dptune.privacy.release import Composition

#: Who counts ``epsilon_published``, by accountant: a key of ``PUBLISHED_ACCOUNTANTS``.
CLAIMED_BY = {
    "gdp_clt": "central limit (no bound)",
    "pure": "pure DP",
    "plrvo": "PLRV-O's theorem 4.9 (no bound)",
    "plrvo_one_coordinate": "PLRV-O's theorem 4.9 for one coordinate (no bound)",
    "lmo_dp": "LMO-DP's total (no bound)",
    "pmixed": "PMixED's theorem 5.1 (no bound)",
    "dppg": "DP policy gradient's appendix B.1",
    "bandmf": "loss distribution, as epsilon_certified",
}


def renyi_claim(prices: Epsilons, accountant: str, releases: Composition, delta: float) -> float | None:
    """What Renyi DP proves of plain DP-SGD (Mironov 2017), whose users publish it; None of everything else.

    Plain DP-SGD has one Gaussian noise, one sample rate, and a sensitivity of 1. Reports show this claim.

    Args:
        accountant: the key of ``CLAIMED_BY`` that counted ``prices.published``.
        releases: those that ``prices.certified`` counts, inherited ones too.
        delta: of all these epsilons.

    >>> from collections import Counter
    >>> from dptune.privacy.accountants import epsilons
    >>> from dptune.privacy.release import Release
    >>> steps = Counter({Release(sample_rate=0.01, noise_multiplier=1.0): 1000})
    >>> round(renyi_claim(epsilons(steps, 1e-5), "gdp_clt", steps, 1e-5), 3)
    2.108
    """
    if accountant != "gdp_clt" or len(releases) != 1 or not math.isfinite(max(prices.published, prices.certified)):
        return None
    (one,) = releases
    gaussian = one.noise == "gaussian" and one.gaussian_multiplier == one.noise_multiplier
    plain = gaussian and not one.adaptive and not one.coefficients and one.sampler.like_poisson
    return rdp_epsilon(releases, delta) if plain else None
