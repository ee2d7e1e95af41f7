"""Figures that judge Laplace-mixture noise beside a Gaussian. No figure here is a guarantee.

Guarantees are computed in ``accountants``.
"""

from __future__ import annotations

import math
from collections import Counter

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import check_delta, has_noiseless, pld_epsilon, smallest_epsilon
from dptune.privacy.accounting.mixture_bounds import limit_multiplier
from dptune.privacy.accounting.published_accountants import (
    law_of,
    lmo_dp_epsilon,
    lmo_dp_step_epsilon,
    plrvo_one_coordinate_epsilon,
)
from dptune.privacy.calibration import calibrate
from dptune.privacy.release import Composition, Release


def limit_epsilon(composition: Composition, delta: float) -> float:
    """The epsilon in the limit of high dimension, when a shift is spread over all coordinates. NOT a bound.

    It comes from the loss distribution of the Gaussian that a mixture tends to. The truth may lie below it at a small
    dimension, and above it at a small epsilon.
    """
    check_delta(delta)
    if not composition or has_noiseless(composition):
        return math.inf if composition else 0.0
    gaussian: Composition = Counter()
    for release, count in composition.items():
        gaussian[Release(release.sample_rate, limit_multiplier(release))] += count
    return pld_epsilon(gaussian, delta)


def has_limit(composition: Composition) -> bool:
    """Whether ``limit_epsilon`` applies: not to Gaussians alone, nor to a scale shared by all coordinates, nor with
    clipping in l1, where a shift that is spread vanishes.
    """
    usual = all(release.norm == "l2" and release.noise in ("gaussian", "laplace_mixture") for release in composition)
    return usual and any(release.law for release in composition)


def mixture_figures(composition: Composition, delta: float) -> dict[str, float]:
    """More figures of Laplace mixtures, by name; none if other releases are among them. No figure is a guarantee."""
    if None in (laws := {release.law for release in composition}) or len(laws) != 1:
        return {}
    release = next(iter(composition))
    law = law_of(release)
    figures: dict[str, float] = {
        "noise_mean_absolute": law.mean_absolute,
        "noise_variance": law.variance,
        "noise_entropy": law.entropy,
        "noise_fisher_information": law.fisher_information,
    }
    if not delta:
        return figures
    if release.norm == "l1":
        dimension = l1_break_even(composition, delta)
        return figures | ({} if dimension is None else {"l1_useful_up_to_effective_dimension": dimension})
    if has_limit(composition):
        figures["epsilon_floor_high_dimension"] = limit_epsilon(composition, delta)
    if law.is_gamma:
        figures["epsilon_as_published_one_coordinate_unsound"] = plrvo_one_coordinate_epsilon(composition, delta)
    elif not law.constant:
        for name, in_domain in (("all_orders_unsound", False), ("in_domain_one_coordinate", True)):
            figures[f"step_epsilon_equation_4_{name}"] = lmo_dp_step_epsilon(law, delta, in_domain=in_domain)
        figures["epsilon_as_published_orders_to_127_unsound"] = lmo_dp_epsilon(composition, delta, 127)
    return figures


def l1_break_even(composition: Composition, delta: float) -> float | None:
    """The dimension up to which noise on an l1-clipped gradient is better than a Gaussian of equal certified epsilon.

    A gradient with d equal coordinates that is clipped to an l1 norm of 1 has an l2 norm of 1 / sqrt(d). Its ratio to
    the standard deviation of the noise equals that of an l2-clipped gradient to z if d = (z / deviation)^2. For other
    gradients d is the effective dimension (l1 norm / l2 norm)^2: for normal ones 2 / pi of their coordinates. Returns
    None if no Gaussian has that epsilon: 0, say, or infinity.
    """
    widest = max(law_of(release).variance for release in composition)
    try:
        return gaussian_of_equal_epsilon(composition, delta) ** 2 / widest
    except ConfigError:
        return None


def gaussian_of_equal_epsilon(composition: Composition, delta: float) -> float:
    """The noise multiplier of Gaussian releases at the same rates with the same certified epsilon.

    Raises: ConfigError if there is none: that epsilon is 0, infinite, or takes more noise than is searched.

    Example:
        >>> from collections import Counter
        >>> from dptune.privacy.accounting.mixture_figures import gaussian_of_equal_epsilon
        >>> from dptune.privacy.release import Release
        >>> round(gaussian_of_equal_epsilon(Counter({Release(0.01, 1.2): 100}), delta=1e-5), 3)
        1.2
    """

    def epsilon_of(noise_multiplier: float) -> float:
        gaussian: Composition = Counter()
        for release, count in composition.items():
            gaussian[Release(release.sample_rate, noise_multiplier)] += count
        return pld_epsilon(gaussian, delta)

    return calibrate(epsilon_of, smallest_epsilon(composition, delta))
