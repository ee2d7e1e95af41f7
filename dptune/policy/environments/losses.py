"""What a user's own trajectory asks of the policy and of the critic: losses, and the gradient of one step."""

from __future__ import annotations

import torch

from dptune.policy.environments.rollout import Trajectories
from dptune.policy.local import Loss
from dptune.policy.policies import Function, Policy


def policy_loss(policy: Policy, entropy_weight: float) -> Loss:
    """-mean(pi / pi_old * A) - weight * entropy; no clipping of the ratio, for the radius bounds the step (remark 5.2).

    Data: features, actions, log probabilities under the old policy, advantages.
    """

    def loss(parameters: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        features, actions, before, gains = rows
        ratio = (policy.log_probability(parameters, features, actions) - before).exp()
        wanted = ratio * gains + entropy_weight * policy.entropy(parameters, features)
        return -(wanted * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)

    return loss


def value_loss(critic: Function) -> Loss:
    """Mean squared error / 2. Data: features, returns."""

    def loss(parameters: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        features, returns = rows
        errors = critic(parameters, features).squeeze(-1) - returns
        return (errors.square() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1) / 2

    return loss


def gradients(
    policy: Policy, parameters: torch.Tensor, trajectories: Trajectories, gains: torch.Tensor
) -> torch.Tensor:
    """(K, parameters): each user's policy gradient, mean_t grad log pi(a_t | s_t) A_t, not clipped (algorithm 2)."""
    taken = trajectories.taken
    own = parameters.repeat(len(taken), 1).requires_grad_()
    logs = policy.log_probability(own, trajectories.features[:, :-1], trajectories.actions)
    means = (logs * gains * taken).sum(dim=1) / taken.sum(dim=1).clamp(min=1)
    (found,) = torch.autograd.grad(means.sum(), own)
    return found
