"""What is computed from pooled trajectories: sound for simulated users, who are nobody, and for nobody else."""

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
    critic: Function, start: torch.Tensor, met: Trajectories, returns: torch.Tensor, training: PolicyTraining
) -> torch.Tensor:
    """The critic after Adam steps on all trajectories together, not clipped, without noise.

    A raw critic is one fitted so to private trajectories.
    """
    parameters = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=training.critic_learning_rate)
    loss, generator = value_loss(critic), torch.Generator().manual_seed(training.seed)
    rows = (met.features[:, :-1][met.taken], returns[met.taken] / training.value_scale)
    for _ in range(training.epochs):
        for chosen in torch.randperm(len(rows[1]), generator=generator).tensor_split(training.minibatches):
            optimizer.zero_grad()
            loss(parameters, tuple(part[None, chosen] for part in rows), torch.ones(1, len(chosen))).sum().backward()
            optimizer.step()
    return parameters.detach()


def fisher_extent(
    policy: Policy, parameters: torch.Tensor, met: Trajectories, regulariser: float
) -> tuple[float, float]:
    """(largest eigenvalue, trace) of the regularised Fisher matrix E[psi psi^T] on these trajectories."""

    def log_probability(moved: torch.Tensor, features: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return policy.log_probability(moved, features[None], action[None]).squeeze(0)

    taken = met.taken
    scores = vmap(grad(log_probability), in_dims=(None, 0, 0))
    each = scores(parameters, met.features[:, :-1][taken], met.actions[taken]).double()
    fisher = each.T @ each / len(each) + regulariser * torch.eye(policy.size, dtype=torch.float64)
    return float(torch.linalg.eigvalsh(fisher)[-1]), float(fisher.trace())
