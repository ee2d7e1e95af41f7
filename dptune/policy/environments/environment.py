"""Environments by name: the translation between their spaces and a policy's, and users' trajectories in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.policy.policies import Policy

RIVERSWIM = "dptune/Riverswim-v0"
#: dptune's own environments, registered with gymnasium on first use: name -> (class, options).
OWN = {
    RIVERSWIM: ("dptune.policy.environments.swimmers:Riverswim", {}),
    "dptune/Dosing-v0": ("dptune.policy.environments.dosing:Dosing", {}),
    "dptune/Dosing-v1": ("dptune.policy.environments.dosing:Dosing", {"random_meals": True}),
}
_DOSING_SCALES = ([80.0, 33.0, 33.0, 17.0, 17.0, 0.0, 0.0, 80.0, 0.0], [20.0] * 5 + [1e4, 1e3, 20.0, 1e3])
#: (centre, scale) of every observed number, fixed and public. Running means, as in most public code, would carry raw
#: private observations into the policy.
_SCALES: dict[str, tuple[list[float], list[float]]] = {
    "Acrobot-v1": ([0.0] * 6, [1.0] * 4 + [4 * np.pi, 9 * np.pi]),
    "dptune/Dosing-v0": _DOSING_SCALES,
    "dptune/Dosing-v1": _DOSING_SCALES,
    "HalfCheetah-v5": ([0.0] * 17, [1.0] * 8 + [5.0] * 9),
    "Hopper-v5": ([1.0] + [0.0] * 10, [1.0] * 5 + [5.0] * 6),
}


@dataclass(frozen=True)
class Environment:
    """An environment by name and options; each user acts in a copy of it.

    Attributes:
        id: gymnasium's id, or one of ``OWN``.
        options: arguments of its constructor, such as ``stay`` of Riverswim.

    Raises: ConfigError as ``vector``.
    """

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.vector(1).close()  # raises for a bad id or option

    def register(self) -> None:
        """Register dptune's own environments with gymnasium. Raises: ConfigError if gymnasium is missing."""
        _gymnasium()

    def vector(self, count: int) -> Any:
        """Make a gymnasium vector environment of ``count`` copies; a copy whose episode ended resets at its next step.

        Raises: ConfigError naming an unknown id or option, or the extra that is not installed.
        """
        gymnasium = _gymnasium()
        # CartPole's own vector version is not used: its copies share a generator, so that when one user's episode ends,
        # the next start of all others changes.
        native = self.id == RIVERSWIM
        try:
            mode = "vector_entry_point" if native else "sync"
            return gymnasium.make_vec(self.id, num_envs=count, vectorization_mode=mode, **self.options)
        except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
            raise ConfigError("environment", f"unknown {self.id!r} ({error})", fix=_KNOWN) from None
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            problem = f"{self.id} needs a package that is missing ({error})"
            raise ConfigError("environment", problem, fix="pip install 'dptune[mujoco]'") from None
        except TypeError as error:
            raise ConfigError("environment.options", f"{dict(self.options)}: {error}", fix="leave them out") from None


_KNOWN = "use CartPole-v1, Acrobot-v1, HalfCheetah-v5, Hopper-v5, " + ", ".join(OWN)


@dataclass(frozen=True)
class Interface:
    """Translation of an environment's observations to features, and of a policy's actions to the environment's.

    Attributes:
        features: number of features that the policy sees.
        actions: number of choices, or of dimensions of a continuous action.
        continuous: whether actions are continuous.
        tabular: whether observations are numbers of states, each of which becomes a feature (one-hot).
        centre, scale: (features,) public constants: a feature is (observation - centre) / scale.
        low, high: (actions,) bounds of continuous actions; empty for discrete ones.
    """

    features: int
    actions: int
    continuous: bool
    tabular: bool
    centre: NDArray[np.float32]
    scale: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]

    @classmethod
    def of(cls, environment: Environment) -> Interface:
        """Make the interface of an environment.

        Raises: ConfigError for spaces that are neither discrete nor boxes of one dimension.
        """
        spaces = _gymnasium().spaces
        vector = environment.vector(1)
        states, choices = vector.single_observation_space, vector.single_action_space
        vector.close()
        discrete = isinstance(choices, spaces.Discrete)
        tabular = isinstance(states, spaces.Discrete)
        for name, space in (("observations", states), ("actions", choices)):
            if not (isinstance(space, spaces.Discrete) or (isinstance(space, spaces.Box) and len(space.shape) == 1)):
                raise ConfigError("environment", f"{environment.id} has {name} {space}", fix="use another environment")
        features = int(states.n) if tabular else int(states.shape[0])
        centre, scale = _SCALES.get(environment.id, ([0.0] * features, [1.0] * features))
        return cls(
            features=features,
            actions=int(choices.n) if discrete else int(choices.shape[0]),
            continuous=not discrete,
            tabular=tabular,
            centre=_floats(centre),
            scale=_floats(scale),
            low=_floats([] if discrete else choices.low),
            high=_floats([] if discrete else choices.high),
        )

    def encode_observations(self, observations: NDArray[Any]) -> torch.Tensor:
        """Scale observations, or encode states as one-hot rows: (users, features)."""
        if self.tabular:
            return torch.eye(self.features)[torch.from_numpy(np.asarray(observations)).long()]
        return torch.from_numpy((observations.astype(np.float32) - self.centre) / self.scale)

    def decode_actions(self, actions: torch.Tensor) -> NDArray[Any]:
        """Map a policy's actions to the environments': a continuous 0 to the middle of the bounds, 1 to the upper."""
        if not self.continuous:
            return np.asarray(actions.numpy())
        middle, half = (self.high + self.low) / 2, (self.high - self.low) / 2
        return np.asarray(np.clip(middle + half * actions.numpy(), self.low, self.high))


def _floats(values: Any) -> NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            "environment", "needs gymnasium, which is missing", fix="pip install 'dptune[policy]'"
        ) from None
    for name, (entry_point, options) in OWN.items():
        if name not in gymnasium.registry:
            vector = "dptune.policy.environments.swimmers:RiverswimVector" if name == RIVERSWIM else None
            gymnasium.register(name, entry_point=entry_point, kwargs=options, vector_entry_point=vector)
    return gymnasium


@dataclass(frozen=True)
class Trajectories:
    """Trajectories of K users with T steps each; a user whose episode ends early begins another one. Private.

    Attributes:
        users: numbers of the users.
        features: (K, T + 1, features) before each step, and after the last.
        actions: (K, T) or (K, T, dimensions), as the policy sampled them, before they were clipped to bounds.
        rewards: (K, T) rewards of the steps.
        terminated: (K, T) whether the step reached a terminal state, as gymnasium says it: its value is 0.
        episode_ends: (K, T) whether the step ended an episode, in a terminal state or at its time limit.
        step_mask: (K, T) whether the row is a step of the user. A row in which the environment resets is none, and a
            null user, whose slot is empty, has none.
    """

    users: tuple[int, ...]
    features: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    terminated: torch.Tensor
    episode_ends: torch.Tensor
    step_mask: torch.Tensor


class Users:
    """A stream of simulated users: every update gets K new ones, each in an environment that was just reset.

    Args:
        count: K, number of users in each update.
        steps: T, number of steps of each user; an episode that is not over by then is cut off and never resumed.
        seed: seed of environments and actions. Unlike the noise's, the randomness of simulated users needs no secrecy.
        continuing: whether to continue the episodes of the update before, as much public code does. A user is then in
            several updates, and ``dptune.policy.run_files.UserRegister`` ends the run with an error.
    """

    def __init__(self, environment: Environment, count: int, steps: int, seed: int, continuing: bool = False) -> None:
        self.interface = Interface.of(environment)
        self._environments = environment.vector(count)
        self._count, self._steps, self._seed, self._continuing = count, steps, seed, continuing
        self._observations: Any = None
        self._resting = torch.zeros(count, dtype=torch.bool)
        self._ids: tuple[int, ...] = ()

    def meet(self, number: int, policy: Policy, parameters: torch.Tensor) -> Trajectories:
        """Roll out the policy with these parameters for the users of update ``number``. Private."""
        environment_seed, action_seed = map(int, np.random.SeedSequence([self._seed, number]).generate_state(2))
        generator = torch.Generator().manual_seed(action_seed)
        newcomers = range(number * self._count, (number + 1) * self._count)
        if self._observations is None or not self._continuing:
            self._observations, _ = self._environments.reset(seed=environment_seed)
            self._resting = torch.zeros(self._count, dtype=torch.bool)
            users = tuple(newcomers)
        else:  # a user whose episode ended is replaced by a new one
            users = tuple(
                new if over else old for old, new, over in zip(self._ids, newcomers, self._resting, strict=True)
            )
        self._ids = users
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in _COLUMNS}
        features = self.interface.encode_observations(self._observations)
        for _ in range(self._steps):
            actions = policy.sample(parameters, features, generator)
            self._observations, rewards, terminated, truncated, _ = self._environments.step(
                self.interface.decode_actions(actions)
            )
            ends, rewards = torch.from_numpy(terminated), torch.from_numpy(rewards).float()
            over = ends | torch.from_numpy(truncated)
            for name, value in zip(_COLUMNS, (features, actions, rewards, ends, over, ~self._resting), strict=True):
                columns[name].append(value)
            features, self._resting = self.interface.encode_observations(self._observations), over
        columns_by_name = {name: torch.stack(values, dim=1) for name, values in columns.items()}
        columns_by_name["features"] = torch.cat([columns_by_name["features"], features[:, None]], dim=1)
        return Trajectories(users, **columns_by_name)

    def close(self) -> None:
        """Close the stream's environments."""
        self._environments.close()


_COLUMNS = ("features", "actions", "rewards", "terminated", "episode_ends", "step_mask")


def advantages(
    trajectories: Trajectories, values: torch.Tensor, discount: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), both (K, T), by generalised advantage estimation (Schulman et al. 2016). Private.

    Each row depends on its own user's trajectory alone.

    Args:
        values: (K, T + 1) values of the features; with zeros and a ``decay`` of 1, advantages are discounted returns.
        discount, decay: gamma and lambda.
    """
    rewards, alive = trajectories.rewards, (~trajectories.terminated).float()
    goes_on = (~trajectories.episode_ends).float()
    running, found = torch.zeros(len(rewards)), torch.zeros_like(rewards)
    for step in reversed(range(rewards.shape[1])):
        error = rewards[:, step] + discount * values[:, step + 1] * alive[:, step] - values[:, step]
        running = error + discount * decay * goes_on[:, step] * running
        running = torch.where(trajectories.step_mask[:, step], running, torch.zeros(()))
        found[:, step] = running
    return found, found + values[:, :-1]
