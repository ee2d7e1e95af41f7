"""Losses of policy and critic on each user's own trajectory, and each user's policy gradient."""

from __future__ import annotations

import torch

from dptune.policy.environments.rollout import Trajectories
from dptune.policy.local import Loss
from dptune.policy.policies import Function, Policy


def policy_loss(policy: Policy, entropy_weight: float) -> Loss:
    """Make the loss -mean(pi / pi_old * A) - entropy_weight * entropy (remark 5.2).

    The ratio is not clipped, unlike PPO's: the clip radius bounds the step instead. The loss takes features, actions,
    log-probabilities under the old policy, and advantages.
    """

    def loss(parameters: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        features, actions, old_log_probabilities, gains = rows
        ratio = (policy.log_probability(parameters, features, actions) - old_log_probabilities).exp()
        objective = ratio * gains + entropy_weight * policy.entropy(parameters, features)
        return -(objective * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)

    return loss


def value_loss(critic: Function) -> Loss:
    """Make the loss of a critic: half the mean squared error. The loss takes features and returns."""

    def loss(parameters: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        features, returns = rows
        errors = critic(parameters, features).squeeze(-1) - returns
        return (errors.square() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1) / 2

    return loss


def gradients(
    policy: Policy, parameters: torch.Tensor, trajectories: Trajectories, gains: torch.Tensor
) -> torch.Tensor:
    """(K, parameters) policy gradient of each user, mean over t of grad log pi(a_t | s_t) A_t (algorithm 2). Private.

    Args:
        gains: (K, T) advantages A.
    """
    mask = trajectories.step_mask
    own = parameters.repeat(len(mask), 1).requires_grad_()
    logs = policy.log_probability(own, trajectories.features[:, :-1], trajectories.actions)
    means = (logs * gains * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    (found,) = torch.autograd.grad(means.sum(), own)
    return found
