"""Environments by name, with a policy's observations, in fixed public scales, and its actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.errors import ConfigError

RIVERSWIM = "dptune/Riverswim-v0"
#: Ours, registered with gymnasium on first use.
OWN = {
    RIVERSWIM: ("dptune.policy.environments.swimmers:Riverswim", {}),
    "dptune/Dosing-v0": ("dptune.policy.environments.dosing:Dosing", {}),
    "dptune/Dosing-v1": ("dptune.policy.environments.dosing:Dosing", {"random_meals": True}),
}
#: (centre, scale) of every observed number. Running means of observations would be raw private data in the policy.
_SCALES: dict[str, tuple[list[float], list[float]]] = {
    "Acrobot-v1": ([0.0] * 6, [1.0] * 4 + [4 * np.pi, 9 * np.pi]),
    "dptune/Dosing-v0": ([80.0, 33.0, 33.0, 17.0, 17.0, 0.0, 0.0, 80.0, 0.0], [20.0] * 5 + [1e4, 1e3, 20.0, 1e3]),
    "HalfCheetah-v5": ([0.0] * 17, [1.0] * 8 + [5.0] * 9),
    "Hopper-v5": ([1.0] + [0.0] * 10, [1.0] * 5 + [5.0] * 6),
}
_SCALES["dptune/Dosing-v1"] = _SCALES["dptune/Dosing-v0"]


@dataclass(frozen=True)
class Environment:
    """An environment, by name and options; each user is one copy of it.

    Attributes:
        id: gymnasium's id, or one of ``OWN``.
        options: options of its constructor, such as ``stay`` of Riverswim.
    """

    id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.vector(1).close()  # raises for a bad id or option

    def register(self) -> None:
        """Make ``OWN`` known to gymnasium."""
        _gymnasium()

    def vector(self, count: int) -> Any:
        """``count`` copies as a gymnasium vector environment whose ended episodes start again at the next step.

        Raises: ConfigError naming an unknown id or option, or the extra that is not installed.
        """
        gymnasium = _gymnasium()
        # Not CartPole's own vector version: its users share a generator, so one who falls moves the others' next start.
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
    """The observations and actions of a policy in an environment.

    Attributes:
        features: number of features that the policy sees.
        actions: number of choices, or dimensions of a continuous action.
        tabular: whether each feature stands for one state.
        centre, scale: constants that observations are scaled by; public.
        low, high: bounds of continuous actions.
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
        """Raises: ConfigError for spaces that are neither discrete nor boxes of one dimension."""
        spaces = _gymnasium().spaces
        vector = environment.vector(1)
        seen, done = vector.single_observation_space, vector.single_action_space
        vector.close()
        discrete = isinstance(done, spaces.Discrete)
        tabular = isinstance(seen, spaces.Discrete)
        for name, space in (("observations", seen), ("actions", done)):
            if not (isinstance(space, spaces.Discrete) or (isinstance(space, spaces.Box) and len(space.shape) == 1)):
                raise ConfigError("environment", f"{environment.id} has {name} {space}", fix="use another environment")
        features = int(seen.n) if tabular else int(seen.shape[0])
        centre, scale = _SCALES.get(environment.id, ([0.0] * features, [1.0] * features))
        return cls(
            features=features,
            actions=int(done.n) if discrete else int(done.shape[0]),
            continuous=not discrete,
            tabular=tabular,
            centre=_floats(centre),
            scale=_floats(scale),
            low=_floats([] if discrete else done.low),
            high=_floats([] if discrete else done.high),
        )

    def seen(self, observations: NDArray[Any]) -> torch.Tensor:
        """(users, features) scaled observations."""
        if self.tabular:
            return torch.eye(self.features)[torch.from_numpy(np.asarray(observations)).long()]
        return torch.from_numpy((observations.astype(np.float32) - self.centre) / self.scale)

    def done(self, actions: torch.Tensor) -> NDArray[Any]:
        """Actions as the environments take them: a continuous 0 is the middle of the bounds, 1 the upper bound."""
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
