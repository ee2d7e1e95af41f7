"""The noisy score of a candidate: how much it lowers the loss of units of privacy, each of which counts a little.

    score = -(sum over units u of clip(l_u(w) - l_u(w0), -c, c) + z c xi) / n

l_u is the mean over the unit's records of their mean negative log-likelihood a token (nats), w the candidate, w0 the
public base model, xi standard normal, n the public number of units. Differences to the base vary far less than losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import is_of_device
from dptune.mechanisms.noises.gaussian import standard_normal
from dptune.privacy.certificate import ScoreTerms
from dptune.privacy.entropy import Entropy
from dptune.training.data import Tokens
from dptune.training.losses import model_losses
from dptune.training.models.causal import evaluation_mode
from dptune.training.privacy_units import PrivacyUnits

Array = NDArray[np.float64]

#: One unit moves the integer sum by at most this.
ONE = 1 << 20


@torch.no_grad()
def unit_losses(model: Any, tokens: Tokens, units: PrivacyUnits, rows: int) -> Array:
    """(units,) mean loss in nats of each unit's records; NaN where one cannot be computed. Private.

    Every batch has the same public shape, so that no record's loss depends on which others are there. At most
    ``units.most`` records of a unit count, the first ones; the loss of a unit without records is 0.
    """
    device, width = next(model.parameters()).device, len(tokens.rows)
    losses = np.zeros(width)
    with evaluation_mode(model):
        for start in range(0, width, rows):
            losses[start : start + rows] = _row_losses(
                model, tokens, np.arange(start, min(start + rows, width)), device, rows
            )
    return np.array([losses[one[: units.most]].mean() if len(one) else 0.0 for one in units.members])


def _row_losses(model: Any, tokens: Tokens, chosen: NDArray[np.int64], device: torch.device, rows: int) -> Array:
    """Losses of the chosen rows; NaN for a row that raises.

    Such a row must not make the candidate fail, nor the others of its batch count as the worst: then the presence of
    one unit would decide more than its own share. So where a batch raises, each of its rows is computed alone.

    Raises: OSError, and the error of full memory or a GPU that failed, which are the machine's: batches have one shape.
    """
    try:
        ids, mask = tokens.batch(chosen, device, height=rows)
        return np.asarray(model_losses(model, ids, mask)[: len(chosen)].double().cpu().numpy(), dtype=np.float64)
    except Exception as error:
        if isinstance(error, OSError) or is_of_device(error):
            raise
        if len(chosen) == 1:
            return np.array([np.nan])
    return np.concatenate([_row_losses(model, tokens, chosen[[at]], device, rows) for at in range(len(chosen))])


def clipped_sum(losses: Array, before: Array, clip: float) -> int:
    """The integer sum of clipped differences (units,), in units of clip / ``ONE``; what is no number counts as +clip.

    Guarantee: adding or removing one unit moves it by at most ``ONE``.
    """
    with np.errstate(invalid="ignore"):
        shares = (losses - before) / clip
    shares = np.where(np.isfinite(shares), np.clip(shares, -1.0, 1.0), 1.0)
    return int(np.rint(shares * ONE).astype(np.int64).sum())


def draw_noise(entropy: Entropy) -> float:
    """Draw the noise of a score, one standard normal. Private, as long as a score may still be made of it."""
    return float(standard_normal(entropy, 1, torch.device("cpu"))[0])


def noisy_score(losses: Array, before: Array, terms: ScoreTerms, noise: float) -> float:
    """The score. Call it once its release is charged, and with one ``noise`` for one score.

    Guarantee: a Gaussian release with noise multiplier ``terms.noise_multiplier`` under add/remove of one unit; the
    noise is rounded to the integers of the sum, a public grid. Private: ``losses``, ``before`` and ``noise``.
    """
    added = round(noise * terms.noise_multiplier * ONE)
    return -(clipped_sum(losses, before, terms.clip) + added) * terms.clip / ONE / terms.units


def best_of(scores: Sequence[float]) -> int | None:
    """The number of the largest score, the first of equal ones; None if every candidate failed (-inf)."""
    best = max(range(len(scores)), key=lambda number: (scores[number], -number))
    return best if scores[best] > -math.inf else None
