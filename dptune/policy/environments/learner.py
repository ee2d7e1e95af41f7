"""What the users of environments compute, and how their released means move policy and critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dptune.errors import ConfigError
from dptune.policy.environments.environment import Interface
from dptune.policy.environments.losses import gradients, policy_loss, value_loss
from dptune.policy.environments.public import fisher_extent, fit_values
from dptune.policy.environments.rollout import Trajectories, Users, advantages
from dptune.policy.environments.schedule import PolicyTraining
from dptune.policy.learner import ReleaseMeans
from dptune.policy.local import Steps, local_updates
from dptune.policy.method import Dppg
from dptune.policy.policies import Linear, Perceptron, Policy
from dptune.policy.trust_region import Update, kl_radius, l2_radius


@dataclass
class PolicyState:
    """Everything that goes from one update to the next: released values alone, unless the critic is raw."""

    policy: torch.Tensor
    critic: torch.Tensor
    last: dict[str, torch.Tensor] = field(default_factory=dict)  # the last released updates

    def tensors(self) -> dict[str, torch.Tensor]:
        """The content of state.safetensors."""
        return {"policy": self.policy, "critic": self.critic} | {f"last.{key}": it for key, it in self.last.items()}

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> PolicyState:
        """The state that ``tensors`` wrote."""
        last = {key.removeprefix("last."): value for key, value in tensors.items() if key.startswith("last.")}
        return cls(tensors["policy"], tensors["critic"], last)


class PolicyLearner:
    """The parts of a run that do not change from update to update."""

    def __init__(self, interface: Interface, method: Dppg, training: PolicyTraining) -> None:
        self.method, self.training = method, training
        self.policy = policy_for(interface, training)
        inner = (training.critic_hidden,) * 2 if training.critic_hidden else ()
        self.critic = Perceptron((interface.features, *inner, 1))

    def start(self) -> PolicyState:
        """The initial state. Public."""
        generator = torch.Generator().manual_seed(self.training.seed + 1)
        return PolicyState(self.policy.initial(self.training.seed), self.critic.initial(generator, last_gain=1.0))

    def values(self, state: PolicyState, features: torch.Tensor) -> torch.Tensor:
        """(K, T + 1) values by the critic; zeros without one."""
        if self.method.critic == "none":
            return torch.zeros(features.shape[:2])
        return self.critic(state.critic, features).squeeze(-1) * self.training.value_scale

    def updates(self, state: PolicyState, met: Trajectories, number: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(each block's (K, parameters) updates before the last clip; the returns): private."""
        training = self.training
        decay = 1.0 if self.method.critic == "none" else training.decay
        gains, returns = advantages(met, self.values(state, met.features), training.discount, decay)
        if training.algorithm != "ppo":
            blocks = [gradients(self.policy, state.policy, met, gains)]
        else:
            features = met.features[:, :-1]
            loss = policy_loss(self.policy, training.entropy_weight)
            data = (features, met.actions, self.policy.log_probability(state.policy, features, met.actions), gains)
            blocks = [self._local(loss, state.policy, data, met, "policy", state, number)]
        if self.method.critic == "private":
            fitted = (met.features[:, :-1], returns / training.value_scale)
            blocks.append(self._local(value_loss(self.critic), state.critic, fitted, met, "critic", state, number))
        return blocks, returns

    def released(
        self, state: PolicyState, blocks: list[torch.Tensor], radius: float, size: float, release: ReleaseMeans
    ) -> PolicyState:
        """The state of the next update, moved by the noisy means of ``updates``."""
        means = release(blocks, (radius, self.training.critic_radius)[: len(blocks)])
        after = PolicyState(state.policy + size * means[0], state.critic, {"policy": means[0]})
        if self.method.critic == "private":
            after.critic, after.last["critic"] = state.critic + means[1], means[1]
        return after

    def fitted(self, state: PolicyState, met: Trajectories, returns: torch.Tensor) -> torch.Tensor:
        """The critic after training on trajectories as they are: simulated ones, or, where it is raw, the users'."""
        return fit_values(self.critic, state.critic, met, returns, self.training)

    def _local(
        self, loss: Any, start: torch.Tensor, data: Any, met: Trajectories, name: str, state: PolicyState, number: int
    ) -> torch.Tensor:
        training, critic = self.training, name == "critic"
        steps = Steps(
            learning_rate=training.critic_learning_rate if critic else training.learning_rate,
            epochs=training.epochs,
            minibatches=training.minibatches,
            radius=training.critic_radius if critic else training.radius,
        )
        released = state.last.get(name) if training.warm_moments else None
        generator = torch.Generator().manual_seed(number)
        return local_updates(loss, start, data, met.taken, steps, generator, released)

    def radius(self, state: PolicyState, number: int, public: Users | None) -> tuple[float, float]:
        """(clip radius, step size) of the policy's update: public."""
        training, noise = self.training, self.method.multipliers[0]
        if training.algorithm == "ppo":
            return training.radius, 1.0
        eta = training.step_size_at(number)
        update = Update(eta, noise, self.policy.size, training.users)
        if training.algorithm == "l2":
            return l2_radius(update, training.trust, training.miss), eta
        assert public is not None
        met = public.meet(number, self.policy, state.policy)
        largest, trace = fisher_extent(self.policy, state.policy, met, training.fisher_regulariser)
        extent, printed = {"largest": largest, "trace": trace}, training.as_printed
        return kl_radius(update, training.trust, training.miss, **extent, as_printed=printed), eta


def policy_for(interface: Interface, training: PolicyTraining) -> Policy:
    """The policy that a schedule asks for. Raises: ConfigError for a linear additive one with continuous actions."""
    if training.hidden:
        function: Any = Perceptron((interface.features, training.hidden, training.hidden, interface.actions))
    else:
        if interface.continuous and training.form == "additive":
            raise ConfigError("form", "additive is of discrete actions", fix="use outer")
        function = Linear(interface.features, interface.actions, training.form)
    return Policy(function, interface.actions, interface.continuous)
