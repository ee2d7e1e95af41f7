"""Environments by name, and the translation between their spaces and a policy's features and actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError

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
