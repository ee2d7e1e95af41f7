"""The release of users' updates: clip each, sum, add noise, divide by a constant. No other code makes them public."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dptune.errors import ConfigError
from dptune.mechanisms.noise import Gaussian, NoNoise
from dptune.privacy.entropy import Entropy


def projected(updates: torch.Tensor, radius: float) -> torch.Tensor:
    """(users, parameters) rows of l2 norm at most ``radius``, in float64; a row that is not finite becomes zero."""
    rows = updates.double()
    rows = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, torch.zeros_like(rows))
    lengths = rows.norm(dim=1, keepdim=True)
    return rows * (radius / lengths.clamp(min=radius))


def noisy_means(
    updates: Sequence[torch.Tensor], radii: Sequence[float], multipliers: Sequence[float], entropy: Entropy
) -> list[torch.Tensor]:
    """The mean update of every block (policy, critic), clipped and with noise; float32.

    Guarantee: a user whose rows are zeroed moves the joint release by sqrt(sum 1 / multiplier^2) deviations at most.
    Private: ``updates``. Public: everything else, the number of users included.

    Args:
        updates: one (users, parameters) matrix for each block; row k of each is the same user's. A null user is a zero
            row.
        radii: clip radius of every block.
        multipliers: noise's standard deviation on the *sum* over the radius, for every block; all positive, or all 0.

    Raises: ConfigError if blocks differ in users, or only some have noise.
    """
    users = len(updates[0])
    if any(len(block) != users for block in updates) or not users:
        raise ConfigError("updates", "blocks are not of the same users", fix="give a row of each block for every user")
    if not (all(multiplier > 0 for multiplier in multipliers) or not any(multipliers)):
        raise ConfigError("multipliers", f"{list(multipliers)} are not all positive, nor all 0", fix="add noise to all")
    clipped = [projected(block, radius) for block, radius in zip(updates, radii, strict=True)]
    for block, radius in zip(clipped, radii, strict=True):
        assert float(block.norm(dim=1).max()) <= radius * (1 + 1e-6)
    sums = [block.sum(dim=0) for block in clipped]
    scales = [radius * multiplier for radius, multiplier in zip(radii, multipliers, strict=True)]
    noise = Gaussian(1.0) if any(multipliers) else NoNoise()
    return [total / users for total in noise.add(sums, scales, 1.0, entropy)]
