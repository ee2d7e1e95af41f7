"""Computations on pooled trajectories, without clipping or noise. They are sound for simulated users only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.func import grad, vmap

from dptune.policy.environments.losses import value_loss
from dptune.policy.environments.rollout import Trajectories
from dptune.policy.policies import Function, Policy

if TYPE_CHECKING:
    from dptune.policy.environments.schedule import PolicyTraining


def fit_values(
    critic: Function, start: torch.Tensor, trajectories: Trajectories, returns: torch.Tensor, training: PolicyTraining
) -> torch.Tensor:
    """Train a critic with Adam on all trajectories together.

    Not private: with users' trajectories it gives a raw critic, which reveals them.

    Args:
        start: (parameters,) of the critic.
        returns: (K, T) targets.

    Returns: (parameters,) of the trained critic.
    """
    parameters = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=training.critic_learning_rate)
    loss, generator = value_loss(critic), torch.Generator().manual_seed(training.seed)
    mask = trajectories.step_mask
    rows = (trajectories.features[:, :-1][mask], returns[mask] / training.value_scale)
    for _ in range(training.epochs):
        for chosen in torch.randperm(len(rows[1]), generator=generator).tensor_split(training.minibatches):
            optimizer.zero_grad()
            loss(parameters, tuple(part[None, chosen] for part in rows), torch.ones(1, len(chosen))).sum().backward()
            optimizer.step()
    return parameters.detach()


def fisher_extent(
    policy: Policy, parameters: torch.Tensor, trajectories: Trajectories, regulariser: float
) -> tuple[float, float]:
    """(largest eigenvalue, trace) of the Fisher matrix E[psi psi^T] + regulariser * I, psi the gradient of log pi.

    Not private: give it trajectories of simulated users.
    """

    def log_probability(vector: torch.Tensor, features: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return policy.log_probability(vector, features[None], action[None]).squeeze(0)

    mask = trajectories.step_mask
    scores = vmap(grad(log_probability), in_dims=(None, 0, 0))
    each = scores(parameters, trajectories.features[:, :-1][mask], trajectories.actions[mask]).double()
    fisher = each.T @ each / len(each) + regulariser * torch.eye(policy.size, dtype=torch.float64)
    return float(torch.linalg.eigvalsh(fisher)[-1]), float(fisher.trace())
