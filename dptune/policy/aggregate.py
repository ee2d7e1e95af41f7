"""Release of users' updates: clip each, sum them, add noise, divide by a constant. No other code publishes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.gaussian import Gaussian, NoNoise
from dptune.privacy.entropy import Entropy


def project_to_ball(updates: torch.Tensor, radius: float) -> torch.Tensor:
    """Shorten rows of ``updates``, (users, parameters), to an l2 norm of at most ``radius``.

    Returns: float64 rows of the same shape; a row that is not finite becomes zero.
    """
    rows = updates.double()
    rows = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, torch.zeros_like(rows))
    lengths = rows.norm(dim=1, keepdim=True)
    return rows * (radius / lengths.clamp(min=radius))


def noisy_means(
    updates: Sequence[torch.Tensor],
    radii: Sequence[float],
    multipliers: Sequence[float],
    users: int,
    entropy: Entropy,
) -> list[torch.Tensor]:
    """Clip each user's update, sum, add noise, and divide by a constant, for every block (policy, critic).

    Guarantee: a user's rows, whether they are left out or replaced by zeros, move the joint release by at most
    sqrt(sum over blocks of 1 / multiplier^2) standard deviations of its noise. Private: ``updates`` and the number of
    their rows. Public: everything else.

    Args:
        updates: a (rows, parameters) matrix for each block, with a row for each user, in the same order of users.
        radii: clip radius of each block.
        multipliers: standard deviation of the noise on the *sum*, in units of the clip radius, for each block; all
            positive, or all 0 for no noise.
        users: K, the divisor; the number of rows that are expected, not that of those who came.

    Returns: a (parameters,) float32 mean for each block.

    Raises: ConfigError if blocks have different numbers of users, or only some blocks have noise.
    """
    if len({len(block) for block in updates}) != 1:
        raise ConfigError("updates", "blocks are not of the same users", fix="give a row of each block for every user")
    if not (all(multiplier > 0 for multiplier in multipliers) or not any(multipliers)):
        raise ConfigError("multipliers", f"{list(multipliers)} are not all positive, nor all 0", fix="add noise to all")
    clipped = [project_to_ball(block, radius) for block, radius in zip(updates, radii, strict=True)]
    for block, radius in zip(clipped, radii, strict=True):
        assert bool((block.norm(dim=1) <= radius * (1 + 1e-6)).all())
    sums = [block.sum(dim=0) for block in clipped]
    scales = [radius * multiplier for radius, multiplier in zip(radii, multipliers, strict=True)]
    noise = Gaussian(1.0) if any(multipliers) else NoNoise()
    return [total / users for total in noise.add(sums, scales, 1.0, entropy)]
