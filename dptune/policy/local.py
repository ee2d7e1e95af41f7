"""What a user computes from their own trajectory and released parameters.

Users share tensors for speed, one row each, and every operation keeps rows apart: no user's update depends on another.
(``torch.func.vmap`` over a single user's loss gives the same numbers in 3.6 times the time at these sizes.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dptune.policy.aggregate import projected

_BETAS, _TINY = (0.9, 0.999), 1e-8
#: (parameters (K, size), tensors (K, rows, ...), weights of the rows (K, rows)) -> a loss for every user (K,).
Loss = Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Steps:
    """A user's local training.

    Attributes:
        learning_rate: Adam's learning rate.
        epochs: passes over the trajectory.
        minibatches: number of minibatches in each pass.
        radius: radius of the ball around the start to which every step is projected; the release clips to it too.
    """

    learning_rate: float
    epochs: int
    minibatches: int
    radius: float


def local_updates(
    loss: Loss,
    start: torch.Tensor,
    data: tuple[torch.Tensor, ...],
    taken: torch.Tensor,
    steps: Steps,
    generator: torch.Generator,
    released: torch.Tensor | None = None,
) -> torch.Tensor:
    """(K, parameters): how far Adam moves each user away from ``start``, within ``steps.radius`` (algorithm 3).

    A user without a single step taken, a null user, does not move. A user whose update is not finite does not either.

    Args:
        data: tensors (K, T, ...), the users' own.
        taken: (K, T) rows that count.
        released: the last released update, from which Adam's moments start, each user's own copy (appendix C.2.3,
            with the sign of a loss: m = -update, v = update^2); None starts them at zero.
    """
    users, length = taken.shape
    moved = start.repeat(users, 1)
    first = torch.zeros_like(start) if released is None else -released
    first, second = first.expand(users, -1), first.square().expand(users, -1)
    number = 0
    for _ in range(steps.epochs):
        for rows in torch.randperm(length, generator=generator).tensor_split(steps.minibatches):
            number += 1
            moved.requires_grad_()
            total = loss(moved, tuple(part[:, rows] for part in data), taken[:, rows].float()).sum()
            (gradient,) = torch.autograd.grad(total, moved)
            first = _BETAS[0] * first + (1 - _BETAS[0]) * gradient
            second = _BETAS[1] * second + (1 - _BETAS[1]) * gradient.square()
            size = second.div(1 - _BETAS[1] ** number).sqrt() + _TINY
            step = steps.learning_rate * first / (1 - _BETAS[0] ** number) / size
            moved = start + projected(moved.detach() - step - start, steps.radius).float()
    return projected(moved - start, steps.radius) * taken.any(dim=1, keepdim=True)


def normalised(gains: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Each user's own advantages at mean 0 and deviation 1; over several users this would be a leak."""
    counts = taken.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (gains - (gains * taken).sum(dim=1, keepdim=True) / counts) * taken
    return centred / ((centred.square().sum(dim=1, keepdim=True) / counts).sqrt() + 1e-8)
