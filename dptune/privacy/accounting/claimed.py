"""Who counts ``epsilon_published``, in words, and where Renyi DP has a claim beside it."""

from __future__ import annotations

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


def claimed_by_renyi(accountant: str, releases: Composition) -> bool:
    """Whether users of this mechanism publish what Renyi DP proves (Mironov 2017) in place of the central limit.

    They do so for plain DP-SGD: one Gaussian noise, one sample rate, and a sensitivity of 1.

    >>> from collections import Counter
    >>> from dptune.privacy.release import Release
    >>> claimed_by_renyi("gdp_clt", Counter({Release(sample_rate=0.01, noise_multiplier=1.0): 100}))
    True
    """
    if accountant != "gdp_clt" or len(releases) != 1:
        return False
    (one,) = releases
    gaussian = one.noise == "gaussian" and one.gaussian_multiplier == one.noise_multiplier
    return gaussian and not one.adaptive and not one.coefficients and one.sampler.like_poisson
