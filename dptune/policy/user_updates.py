"""Updates of users: the loop over a run's updates, their release (clipped, summed, noised), and each user's own steps.

``environments``, ``language`` and ``tenants`` share it:

for number, release in updates_left(ledger, method, updates, users, entropy):
    blocks = what each new user computes, about K      # private; this part differs between the three packages
    means  = release(blocks, radii)                    # charged on disk first, then clipped, summed and given noise
    state  = a function of the state and the means

No other code publishes users' updates. A test checks that none of the three charges the ledger or draws noise by
itself: a release that no charge precedes would be missing from the run's epsilon.

Users are rows of shared tensors for speed. No operation mixes rows, so no user's update depends on another user.
(``torch.func.vmap`` over a single user's loss gives the same numbers in 3.6 times the time at these sizes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dptune.core.errors import ConfigError
from dptune.mechanisms.noises.gaussian import Gaussian, NoNoise
from dptune.policy.method import Dppg
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger

#: Function that releases one update: (updates of each block, clip radius of each block) -> noisy mean of each block.
ReleaseMeans = Callable[[Sequence[torch.Tensor], Sequence[float]], list[torch.Tensor]]


def updates_left(
    ledger: Ledger, method: Dppg, updates: int, users: int, entropy: Entropy
) -> Iterator[tuple[int, ReleaseMeans]]:
    """Yield the number of every update that is not charged yet, with the function that releases its means.

    An update that was charged, and then lost when its process died, is skipped: its users have taken part already, and
    a second update with them would cost more than the guarantee states.

    Args:
        users: K, by which every sum is divided.
    """
    for number in range(ledger.releases, updates):
        yield number, partial(release_means, method, number, users, ledger, entropy)


def release_means(
    method: Dppg,
    number: int,
    users: int,
    ledger: Ledger,
    entropy: Entropy,
    updates: Sequence[torch.Tensor],
    radii: Sequence[float],
) -> list[torch.Tensor]:
    """Charge update ``number`` to the ledger, and only then draw its noise.

    Returns: the noisy mean of every block, see ``dptune.policy.user_updates.noisy_means``.
    """
    ledger.charge(method.release(number))
    return noisy_means(updates, radii, method.multipliers, users, entropy)


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


_BETAS, _TINY = (0.9, 0.999), 1e-8
#: Loss of K users: (parameters (K, size), tensors (K, rows, ...), weights of the rows (K, rows)) -> losses (K,).
Loss = Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Steps:
    """Settings of a user's local training.

    Attributes:
        learning_rate: Adam's learning rate.
        epochs: number of passes over the trajectory.
        minibatches: number of minibatches in each pass.
        radius: radius of the l2 ball around the start to which every step is projected; the release clips to it too.
    """

    learning_rate: float
    epochs: int
    minibatches: int
    radius: float


def local_updates(
    loss: Loss,
    start: torch.Tensor,
    data: tuple[torch.Tensor, ...],
    row_mask: torch.Tensor,
    steps: Steps,
    generator: torch.Generator,
    last_update: torch.Tensor | None = None,
) -> torch.Tensor:
    """Train each user's own copy of the parameters with Adam, inside a ball around ``start`` (algorithm 3).

    A user none of whose rows count (a null user) has an update of zero, and so has one whose update is not finite.
    Private: ``data``, ``row_mask`` and the result.

    Args:
        start: (parameters,) released parameters.
        data: tensors (K, T, ...) of the users' own rows.
        row_mask: (K, T) whether a row counts.
        generator: source of the order of rows, which all users share; public.
        last_update: (parameters,) last released update, from which each user's copy of Adam's moments starts
            (appendix C.2.3, with the sign of a loss: m = -update, v = update^2); None starts them at zero.

    Returns: (K, parameters) updates, parameters after training minus ``start``, of l2 norm at most ``steps.radius``.
    """
    users, length = row_mask.shape
    own = start.repeat(users, 1)
    first = torch.zeros_like(start) if last_update is None else -last_update
    first, second = first.expand(users, -1), first.square().expand(users, -1)
    number = 0
    for _ in range(steps.epochs):
        for rows in torch.randperm(length, generator=generator).tensor_split(steps.minibatches):
            number += 1
            own.requires_grad_()
            total = loss(own, tuple(part[:, rows] for part in data), row_mask[:, rows].float()).sum()
            (gradient,) = torch.autograd.grad(total, own)
            first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient.square()
            size = second.div(1 - _BETAS[1] ** number).sqrt() + _TINY
            step = steps.learning_rate * first / (1 - _BETAS[0] ** number) / size
            own = start + project_to_ball(own.detach() - step - start, steps.radius).float()
    return project_to_ball(own - start, steps.radius) * row_mask.any(dim=1, keepdim=True)


def normalise_advantages(gains: torch.Tensor, row_mask: torch.Tensor) -> torch.Tensor:
    """Scale each user's advantages to mean 0 and standard deviation 1, by that user's own mean and deviation.

    Statistics over several users, as in most public code, would let one user move the others' updates.

    Args:
        gains: (K, T) advantages. Private.
        row_mask: (K, T) whether a row counts; the others become 0.
    """
    counts = row_mask.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (gains - (gains * row_mask).sum(dim=1, keepdim=True) / counts) * row_mask
    return centred / ((centred.square().sum(dim=1, keepdim=True) / counts).sqrt() + 1e-8)
