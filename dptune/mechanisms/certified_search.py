"""The search for the best noise of a family at equal certified epsilon.

The certified epsilon of noise on an l2-clipped gradient depends on its noise multiplier alone, 1 / score bound of its
law. The search calibrates that once, which leaves the shape free. Whatever the shape, the variance is at least twice
that of a Gaussian with this multiplier, and exactly twice for a constant scale only
(2 E[1/u^2] >= 2 / (E u)^2 >= 2 / (score bound)^2). So the search ends at the edge of its family, as near to plain
Laplace noise as the family allows. All of it is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from dptune.mechanisms.laplace_noise import LmoDp, Plrvo, at_multiplier
from dptune.mechanisms.planning import Schedule, calibrated
from dptune.mechanisms.published_search import LARGEST_SHAPE, SMALLEST_SHAPE, USEFUL
from dptune.mechanisms.registry import build
from dptune.privacy.laplace_mixtures import InverseScale

Bounds = list[tuple[float, float]]
#: Functions to minimise, of the noise at a clip radius of 1.
OBJECTIVES: dict[str, Callable[[InverseScale], float]] = {
    "variance": lambda law: law.variance,
    "mean_absolute": lambda law: law.mean_absolute,
    "usefulness": lambda law: float(np.exp(law.log_tail(USEFUL))),  # 1 - P(|z| <= 0.9)
}
_PRECISE = {"ftol": 1e-14, "gtol": 1e-10}
_LOG_SHAPE: Bounds = [(math.log(SMALLEST_SHAPE), math.log(LARGEST_SHAPE))]
#: Bounds, from the authors' grid, of: the uniform part's share of the mean, the Gamma part's share of the rest, the log
#: of its shape, and low / high of the uniform part.
_LMO_DP: Bounds = [(0.01, 1.0), (0.0, 1.0), (math.log(0.5), math.log(2.0)), (0.01, 8 / 9)]


def certified_search(
    family: str, epsilon: float, schedule: Schedule, objective: str = "variance", max_grad_norm: float = 1.0
) -> Plrvo | LmoDp:
    """Find the noise of a family that is best by ``objective`` and (epsilon, delta)-DP on the schedule.

    Guarantee: the run is (epsilon, delta)-DP, see ``dptune.mechanisms.planning.calibrated`` with certified accounting.

    Args:
        family: "plrvo" or "lmo_dp".
        objective: a key of ``OBJECTIVES``.
        max_grad_norm: the clip radius of the run, which is an option of PLRV-O's noise.
    """
    probe = calibrated(lambda noise: build(family, {"noise_multiplier": noise}), epsilon, schedule, "certified")
    multiplier = probe.mechanism.knobs().noise_multiplier

    def least(shape_of: Callable[..., InverseScale], bounds: Bounds) -> InverseScale:
        middle = [(low + high) / 2 for low, high in bounds]

        def cost(x: NDArray[np.float64]) -> float:
            shape = shape_of(*x.tolist())  # plain numbers: laws are cached by their values, and written to files
            return math.log(OBJECTIVES[objective](at_multiplier(shape, multiplier)))

        best = minimize(cost, middle, bounds=bounds, options=_PRECISE).x.tolist()
        return at_multiplier(shape_of(*best), multiplier)

    if family == "plrvo":
        law = least(lambda log_k: InverseScale(gamma=(math.exp(log_k), 1.0)), _LOG_SHAPE)
        return Plrvo(k=law.gamma[0], noise_multiplier=multiplier, max_grad_norm=max_grad_norm)
    law = least(_lmo_shape, _LMO_DP)
    return LmoDp(
        preset="none",
        gamma_weight=float(any(law.gamma)),
        gamma_shape=law.gamma[0] or 1.0,
        gamma_scale=law.gamma[1] or 1.0,
        exponential_weight=float(law.exponential > 0),
        exponential_rate=1 / law.exponential if law.exponential else 1.0,
        uniform_weight=1.0,
        uniform_low=law.uniform[0],
        uniform_high=law.uniform[1],
        noise_multiplier=multiplier,
    )


def _lmo_shape(uniform: float, gamma: float, log_k: float, ratio: float) -> InverseScale:
    k, rest = math.exp(log_k), 1 - uniform
    return InverseScale(
        gamma=(k, rest * gamma / k) if rest * gamma > 0 else (0.0, 0.0),
        exponential=rest * (1 - gamma),
        uniform=(2 * uniform * ratio / (1 + ratio), 2 * uniform / (1 + ratio)),
    )
