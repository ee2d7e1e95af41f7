"""The likelihood-ratio attack with shadow models (Carlini et al. 2022, LiRA), computed from scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptune.errors import ConfigError


def lira_scores(
    target: NDArray[np.float64], shadows: NDArray[np.float64], included: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """(candidates,) log-likelihood ratios of "in" against "out", from normal fits to the shadows' scores.

    Means are fitted for every candidate, and one variance for all: with few shadows the paper's per-candidate variances
    are too uncertain (its section VI-C).

    Args:
        target: (candidates,) scores of the attacked model.
        shadows: (shadows, candidates) scores of models that the attacker trained.
        included: (shadows, candidates) True if the shadow was trained on the candidate, by the attacker's coins.

    Raises: ConfigError if some candidate is in every shadow or in none.
    """
    inside, outside = included.sum(axis=0), (~included).sum(axis=0)
    if (np.minimum(inside, outside) == 0).any():
        problem = f"with {len(included)} of them some canary is in all or in none"
        raise ConfigError("audit.shadows", problem, fix="train more shadows")
    mean_in = (shadows * included).sum(axis=0) / inside
    mean_out = (shadows * ~included).sum(axis=0) / outside
    residuals = shadows - np.where(included, mean_in, mean_out)
    freedom = max(1, shadows.size - 2 * shadows.shape[1])
    variance = max(float((residuals**2).sum()) / freedom, 1e-12)
    return np.asarray(((target - mean_out) ** 2 - (target - mean_in) ** 2) / (2 * variance))


def balanced_coins(shadows: int, candidates: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """(shadows, candidates) random coins that put every candidate into half of the shadows."""
    columns = [generator.permutation(shadows) < shadows // 2 for _ in range(candidates)]
    return np.stack(columns, axis=1)
