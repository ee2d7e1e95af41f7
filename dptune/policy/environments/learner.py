"""Updates that users of an environment compute, and the step that policy and critic take by the released means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import grad, vmap

from dptune.core.errors import ConfigError
from dptune.policy.environments.environment import Interface, Trajectories, Users, advantages
from dptune.policy.method import Dppg
from dptune.policy.policies import Function, Linear, Perceptron, Policy
from dptune.policy.schedules import PolicyTraining, Update, kl_radius, l2_radius
from dptune.policy.user_updates import Loss, ReleaseMeans, Steps, local_updates


@dataclass
class PolicyState:
    """All that one update hands to the next: released values, which are public. With a raw critic it is private.

    Attributes:
        policy: (parameters,) of the policy.
        critic: (parameters,) of the critic.
        last: last released update of each block, "policy" and, where it is private, "critic".
    """

    policy: torch.Tensor
    critic: torch.Tensor
    last: dict[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as named tensors, the content of state.safetensors."""
        return {"policy": self.policy, "critic": self.critic} | {
            f"last.{key}": value for key, value in self.last.items()
        }

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> PolicyState:
        """Make the state from its named tensors."""
        last = {key.removeprefix("last."): value for key, value in tensors.items() if key.startswith("last.")}
        return cls(tensors["policy"], tensors["critic"], last)


class PolicyLearner:
    """Networks and schedule of a run, and the computations of one update. It keeps no state between updates."""

    def __init__(self, interface: Interface, method: Dppg, training: PolicyTraining) -> None:
        self.method, self.training = method, training
        self.policy = policy_for(interface, training)
        inner = (training.critic_hidden,) * 2 if training.critic_hidden else ()
        self.critic = Perceptron((interface.features, *inner, 1))

    def start(self) -> PolicyState:
        """Draw the initial state from the schedule's seed. Public."""
        generator = torch.Generator().manual_seed(self.training.seed + 1)
        return PolicyState(self.policy.initial(self.training.seed), self.critic.initial(generator, last_gain=1.0))

    def values(self, state: PolicyState, features: torch.Tensor) -> torch.Tensor:
        """(K, T + 1) values of ``features``, (K, T + 1, features), by the critic; zeros if there is no critic."""
        if self.method.critic == "none":
            return torch.zeros(features.shape[:2])
        return self.critic(state.critic, features).squeeze(-1) * self.training.value_scale

    def updates(
        self, state: PolicyState, trajectories: Trajectories, number: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Compute each user's updates from their own trajectory. Private.

        Args:
            number: number of the update, which seeds the public order of minibatches.

        Returns: (users, parameters) for each block, before the clip of the release; and (K, T) returns.
        """
        training = self.training
        decay = 1.0 if self.method.critic == "none" else training.decay
        values = self.values(state, trajectories.features)
        gains, returns = advantages(trajectories, values, training.discount, decay)
        if training.algorithm != "ppo":
            blocks = [gradients(self.policy, state.policy, trajectories, gains)]
        else:
            features, actions = trajectories.features[:, :-1], trajectories.actions
            loss = policy_loss(self.policy, training.entropy_weight)
            data = (features, actions, self.policy.log_probability(state.policy, features, actions), gains)
            blocks = [self._local_updates(loss, state.policy, data, trajectories, "policy", state, number)]
        if self.method.critic == "private":
            targets = (trajectories.features[:, :-1], returns / training.value_scale)
            loss = value_loss(self.critic)
            blocks.append(self._local_updates(loss, state.critic, targets, trajectories, "critic", state, number))
        return blocks, returns

    def apply_release(
        self, state: PolicyState, blocks: list[torch.Tensor], radius: float, size: float, release: ReleaseMeans
    ) -> PolicyState:
        """Release the means of ``blocks``, as ``updates`` gives them, and return the state that they lead to.

        Args:
            radius: clip radius of the policy's update.
            size: factor that multiplies the policy's mean.
        """
        means = release(blocks, (radius, self.training.critic_radius)[: len(blocks)])
        after = PolicyState(state.policy + size * means[0], state.critic, {"policy": means[0]})
        if self.method.critic == "private":
            after.critic, after.last["critic"] = state.critic + means[1], means[1]
        return after

    def fit_critic(self, state: PolicyState, trajectories: Trajectories, returns: torch.Tensor) -> torch.Tensor:
        """Train the critic on pooled trajectories, without clipping or noise.

        That is sound for simulated users' trajectories only. A raw critic, as published, is trained on the users' own.
        """
        return fit_values(self.critic, state.critic, trajectories, returns, self.training)

    def _local_updates(
        self,
        loss: Loss,
        start: torch.Tensor,
        data: tuple[torch.Tensor, ...],
        trajectories: Trajectories,
        name: str,
        state: PolicyState,
        number: int,
    ) -> torch.Tensor:
        training, critic = self.training, name == "critic"
        steps = Steps(
            learning_rate=training.critic_learning_rate if critic else training.learning_rate,
            epochs=training.epochs,
            minibatches=training.minibatches,
            radius=training.critic_radius if critic else training.radius,
        )
        last = state.last.get(name) if training.warm_moments else None
        generator = torch.Generator().manual_seed(number)
        return local_updates(loss, start, data, trajectories.step_mask, steps, generator, last)

    def radius(self, state: PolicyState, number: int, public: Users | None) -> tuple[float, float]:
        """(clip radius, step size) of the policy's update. Public.

        Args:
            public: simulated users, whose Fisher matrix algorithm "kl" needs.
        """
        training, noise = self.training, self.method.multipliers[0]
        if training.algorithm == "ppo":
            return training.radius, 1.0
        eta = training.step_size_at(number)
        update = Update(eta, noise, self.policy.size, training.users)
        if training.algorithm == "l2":
            return l2_radius(update, training.trust, training.miss), eta
        assert public is not None
        simulated = public.meet(number, self.policy, state.policy)
        largest, trace = fisher_extent(self.policy, state.policy, simulated, training.fisher_regulariser)
        return kl_radius(update, training.trust, training.miss, largest=largest, trace=trace), eta


def policy_for(interface: Interface, training: PolicyTraining) -> Policy:
    """Make the policy that a schedule describes.

    Raises: ConfigError for a linear policy of form "additive" with continuous actions.
    """
    if training.hidden:
        function: Any = Perceptron((interface.features, training.hidden, training.hidden, interface.actions))
    else:
        if interface.continuous and training.form == "additive":
            raise ConfigError("form", "additive is for discrete actions only", fix="use outer")
        function = Linear(interface.features, interface.actions, training.form)
    return Policy(function, interface.actions, interface.continuous)


# Losses of policy and critic on each user's own trajectory, and each user's policy gradient.


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


# Computations on pooled trajectories, without clipping or noise. They are sound for simulated users only.


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
