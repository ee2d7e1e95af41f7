"""Soft Actor-Critic in one file (Haarnoja et al. 2018), with RLDP's sizes (arXiv 2507.22565, section 2.4).

An encoder feeds a Gaussian head (not squashed) and twin critics of one hidden layer. What the paper leaves open is
read as follows. The critics' loss trains the encoder, at the critics' rate; the actor's gradient stops at the encoder,
which has no target of its own. Replay holds states, which are encoded anew in each round. A round draws its
transitions with replacement, so that it takes place as soon as there is one. The actor's loss is taken at replayed
states and fresh actions (replayed ones would give it no gradient). Log deviations are clamped to [-5, 2]; the Huber
loss turns linear at 1; both optimisers are Adam. Weights start as PyTorch starts them, but for the head's, which are
multiplied by 0.1: an untrained agent's actions are then close to independent standard normals.

Whether the agent leaks depends only on the states and rewards that its controller shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_LOG_DEVIATIONS = (-5.0, 2.0)
_COLUMNS = ("states", "actions", "next_states")


@dataclass(frozen=True)
class SacOptions:
    """Settings of SAC, with RLDP's published values as defaults.

    Attributes:
        batch_size: B_SAC, transitions per round.
        rounds: K, gradient rounds per action; 0 leaves the policy as it is.
        width: units of every hidden layer.
        discount: gamma.
        temperature: alpha, constant.
        polyak: tau, the rate at which the target critics follow.
        actor_learning_rate: Adam's learning rate for the actor.
        critic_learning_rate: Adam's learning rate for the critics and the encoder.
        capacity: largest number of transitions in the replay buffer.
    """

    batch_size: int = 4
    rounds: int = 2
    width: int = 128
    discount: float = 0.99
    temperature: float = 0.04
    polyak: float = 0.01
    actor_learning_rate: float = 2e-4
    critic_learning_rate: float = 1e-4
    capacity: int = 10_000


class _Networks(nn.Module):
    def __init__(self, state_size: int, action_size: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(state_size, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
        )
        self.head = nn.Linear(width, 2 * action_size)
        self.critics = nn.ModuleList(
            nn.Sequential(nn.Linear(width + action_size, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(2)
        )


def _values(critics: nn.Module, features: torch.Tensor, actions: torch.Tensor) -> list[torch.Tensor]:
    """Both critics' (batch,) values of actions in encoded states."""
    joined = torch.cat([features, actions], dim=1)
    return [critic(joined).squeeze(1) for critic in critics.children()]


class SoftActorCritic:
    """The agent. Its randomness comes from a public seed and is part of its state."""

    def __init__(self, state_size: int, action_size: int, options: SacOptions, seed: int) -> None:
        self.options = options
        self._generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would reseed every CUDA device too, and make the secret dropout masks public.
            torch.default_generator.manual_seed(seed)
            self.networks = _Networks(state_size, action_size, options.width)
        # A head of the usual size would make the first policy depend on the seed: its means would be random.
        with torch.no_grad():
            self.networks.head.weight.mul_(0.1)
        self._target = copy.deepcopy(self.networks.critics).requires_grad_(False)
        critic = [*self.networks.encoder.parameters(), *self.networks.critics.parameters()]
        self._critic_optimizer = torch.optim.Adam(critic, lr=options.critic_learning_rate)
        self._actor_optimizer = torch.optim.Adam(self.networks.head.parameters(), lr=options.actor_learning_rate)
        self._memory: list[tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]] = []

    @torch.no_grad()
    def act(self, state: torch.Tensor) -> torch.Tensor:
        """Sample an action (action_size,) for a state (state_size,)."""
        action, _ = self._sample(self.networks.encoder(state[None]))
        return action[0]

    def remember(self, state: torch.Tensor, action: torch.Tensor, reward: float, next_state: torch.Tensor) -> None:
        """Store a transition; the oldest goes when the buffer is full."""
        self._memory.append((state, action, reward, next_state))
        del self._memory[: -self.options.capacity]

    def improve(self) -> None:
        """Train for K rounds on transitions drawn with replacement. Raises ValueError if there is none yet."""
        if not self._memory:
            raise ValueError("an agent that remembers nothing has nothing to learn from")
        for _ in range(self.options.rounds):
            chosen = torch.randint(len(self._memory), (self.options.batch_size,), generator=self._generator)
            rows = [self._memory[index] for index in chosen.tolist()]
            states, actions, next_states = (
                torch.stack(tensors) for tensors in zip(*((row[0], row[1], row[3]) for row in rows), strict=True)
            )
            self._improve_critics(states, actions, torch.tensor([row[2] for row in rows]), next_states)
            self._improve_actor(states)
            self._follow()

    def _improve_critics(
        self, states: torch.Tensor, actions: torch.Tensor, rewards: torch.Tensor, next_states: torch.Tensor
    ) -> None:
        with torch.no_grad():
            next_features = self.networks.encoder(next_states)
            next_actions, log_probability = self._sample(next_features)
            value = torch.minimum(*_values(self._target, next_features, next_actions))
            wanted = rewards + self.options.discount * (value - self.options.temperature * log_probability)
        values = _values(self.networks.critics, self.networks.encoder(states), actions)
        loss = torch.stack([functional.huber_loss(value, wanted) for value in values]).sum()
        self._critic_optimizer.zero_grad()
        loss.backward()
        self._critic_optimizer.step()

    def _improve_actor(self, states: torch.Tensor) -> None:
        features = self.networks.encoder(states).detach()
        actions, log_probability = self._sample(features)
        value = torch.minimum(*_values(self.networks.critics, features, actions))
        loss = (self.options.temperature * log_probability - value).mean()
        self._actor_optimizer.zero_grad()
        loss.backward()
        self._actor_optimizer.step()

    def _sample(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw actions in encoded states, with their log probabilities."""
        mean, log_deviation = self.networks.head(features).chunk(2, dim=1)
        log_deviation = log_deviation.clamp(*_LOG_DEVIATIONS)
        noise = torch.randn(mean.shape, generator=self._generator)
        actions = mean + log_deviation.exp() * noise
        density = torch.distributions.Normal(mean, log_deviation.exp())
        return actions, density.log_prob(actions).sum(dim=1)

    @torch.no_grad()
    def _follow(self) -> None:
        pairs = zip(self._target.parameters(), self.networks.critics.parameters(), strict=True)
        for target, online in pairs:
            target.lerp_(online, self.options.polyak)

    def policy(self) -> dict[str, torch.Tensor]:
        """The weights of every network, from which another agent can start."""
        return {name: value.detach().clone() for name, value in self.networks.state_dict().items()}

    def load_policy(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Start from trained weights; the target critics are copies. Raises RuntimeError if shapes differ."""
        self.networks.load_state_dict(weights)
        self._target.load_state_dict(self.networks.critics.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as a flat table of tensors and numbers."""
        state: dict[str, Any] = {f"online.{name}": value for name, value in self.networks.state_dict().items()}
        state |= {f"target.{name}": value for name, value in self._target.state_dict().items()}
        for label, optimizer in self._optimizers():
            for index, moments in optimizer.state_dict()["state"].items():
                state |= {f"{label}.{index}.{name}": value for name, value in moments.items()}
        state["generator"] = self._generator.get_state()
        if self._memory:
            columns = zip(*((row[0], row[1], row[3]) for row in self._memory), strict=True)
            for name, tensors in zip(_COLUMNS, columns, strict=True):
                state[f"memory.{name}"] = torch.stack(tensors)
            state["memory.rewards"] = [row[2] for row in self._memory]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave."""
        self.networks.load_state_dict(_under("online", state))
        self._target.load_state_dict(_under("target", state))
        for label, optimizer in self._optimizers():
            moments: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in _under(label, state).items():
                index, name = key.split(".")
                moments.setdefault(int(index), {})[name] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        self._generator.set_state(state["generator"])
        rewards = state.get("memory.rewards", [])
        columns = [state[f"memory.{name}"] for name in _COLUMNS] if rewards else [[]] * 3
        self._memory = [
            (before, action, reward, after)
            for before, action, reward, after in zip(columns[0], columns[1], rewards, columns[2], strict=True)
        ]

    def _optimizers(self) -> list[tuple[str, torch.optim.Adam]]:
        return [("critic_optimizer", self._critic_optimizer), ("actor_optimizer", self._actor_optimizer)]


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {key[len(prefix) + 1 :]: value for key, value in state.items() if key.startswith(f"{prefix}.")}
