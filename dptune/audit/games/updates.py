"""White-box audit of DP policy gradient: one user's trajectory is in or out, and the attacker sees all releases.

The attacker chooses every trajectory, their own and the others', and sees the noisy means. The bounds hold whatever any
accountant says; the attack reads releases only. Updates are made and released by the code of runs
(``dptune.policy.environments.training.step``, ``dptune.policy.user_updates.release_means``), with any critic.
Environments and rollouts are not audited: trajectories are fixed in advance, for a small linear policy with local PPO
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.epsilon_bounds import best_cuts, errors
from dptune.audit.games.scene import Fit, StepAudit
from dptune.core.errors import ConfigError
from dptune.core.progress import Meter
from dptune.policy.environments.environment import Interface, Trajectories
from dptune.policy.environments.learner import PolicyLearner, PolicyState
from dptune.policy.environments.training import step
from dptune.policy.method import Dppg
from dptune.policy.run_files import UserRegister
from dptune.policy.schedules import PolicyTraining
from dptune.policy.user_updates import release_means
from dptune.privacy.entropy import Entropy
from dptune.privacy.release import Release

_FEATURES, _ACTIONS, _STEPS, _USERS = 2, 2, 4, 8
_PILOT_SHARE, _FEWEST_TRIALS = 0.2, 500
_TRAINING = PolicyTraining(
    algorithm="ppo", users=_USERS, steps=_STEPS, hidden=0, critic_hidden=0, epochs=4, minibatches=1, learning_rate=0.1,
    radius=0.05, critic_radius=0.3, critic_learning_rate=0.1, entropy_weight=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class UpdateScene:
    """The rewards that the attacker gives to users.

    Attributes:
        reward: reward of every step of the user who is in or out.
        others: reward of every step of the other users of that update; None leaves their slots empty.
    """

    name: str
    reward: float
    others: float | None = None


SCENES = (
    UpdateScene("alone", 1.0),
    UpdateScene("alone, punished", -1.0),
    UpdateScene("against the others", 1.0, -1.0),
    UpdateScene("huge rewards", 1e6, -1.0),
    UpdateScene("rewards that are not numbers", float("nan"), -1.0),
)


def audit_updates(
    method: Dppg,
    *,
    trials: int,
    confidence: float,
    delta: float,
    entropy: Entropy,
    updates: int = 1,
) -> StepAudit:
    """Bound mu and epsilon of a run of ``updates`` from below; the attacker's user is in the first one.

    Guarantee: if the run is mu-GDP (or (epsilon, delta)-DP) about one user whose slot may be empty, then ``mu_audited
    <= mu`` (or ``epsilon_audited <= epsilon``) with probability ``confidence``. Pilot trials choose scene, score and
    threshold; only the others count. Later updates show nothing more, unless they depend on more than the releases, as
    with a raw critic.

    Args:
        trials: runs in each world, a fifth of them to choose the attack.

    Returns: the bounds; its steps are updates, in each of which a user takes part for certain.

    Raises: ConfigError for too few trials, or numbers out of range.
    """
    if trials < _FEWEST_TRIALS:
        raise ConfigError("trials", f"{trials} is below {_FEWEST_TRIALS}", fix="use thousands")
    if not (0 < confidence < 1 and updates >= 1):
        raise ConfigError("confidence", f"{confidence} at {updates} updates is out of range", fix="use 0.95, and 1")
    pilot = int(trials * _PILOT_SHARE) // len(SCENES)
    counted = trials - pilot * len(SCENES)
    runs = _Runs.of(method, updates, entropy)
    with Meter(f"audit {method.critic} critic", total=2 * (len(SCENES) * pilot + counted), unit="runs") as meter:
        looks = []
        for scene in SCENES:
            inside, outside = (runs.seen(scene, world, pilot, meter) for world in (True, False))
            half = pilot // 2
            learned = Fit.of(inside[:half], outside[:half], power=2, one_spread=True)
            for fit in (runs.known(scene), learned):
                scores = fit.log_ratio(inside[half:]), fit.log_ratio(outside[half:])
                looks.append((best_cuts(*scores, counted, delta, confidence), fit, scene))
        cuts, fit, scene = max(looks, key=lambda look: look[0].promise)
        inside, outside = (fit.log_ratio(runs.seen(scene, world, counted, meter)) for world in (True, False))
    first = next(release for release in runs.charged if release.part == 0)
    return StepAudit(
        scene.name,
        trials,
        confidence,
        updates,
        1.0,
        delta,
        first,
        mu_errors=errors(inside, outside, cuts.for_mu),
        epsilon_errors=errors(inside, outside, cuts.for_epsilon),
    )


_NOTHING = np.zeros(0, dtype=np.float32)
_INTERFACE = Interface(_FEATURES, _ACTIONS, False, False, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


class _Learner(PolicyLearner):
    """A learner that caches all computations before the first release, since every run starts in the same state."""

    def __init__(self, method: Dppg) -> None:
        super().__init__(_INTERFACE, method, _TRAINING)
        self._results: dict[tuple[str, int], tuple[Trajectories, Any]] = {}

    def updates(
        self, state: PolicyState, trajectories: Trajectories, number: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        return self._once("updates", trajectories, lambda: PolicyLearner.updates(self, state, trajectories, number))

    def fit_critic(self, state: PolicyState, trajectories: Trajectories, returns: torch.Tensor) -> torch.Tensor:
        return self._once("critic", trajectories, lambda: PolicyLearner.fit_critic(self, state, trajectories, returns))

    def _once(self, name: str, trajectories: Trajectories, compute: Callable[[], Any]) -> Any:
        if trajectories.users[0] >= _USERS:  # a later update, whose state is noisy and differs from run to run
            return compute()
        key = name, id(trajectories)
        if key not in self._results:
            # The trajectories are kept too, or a new object could get the id of one that was deleted.
            self._results[key] = trajectories, compute()
        return self._results[key][1]


@dataclass(frozen=True)
class _Stream:
    """A replacement of ``environments.environment.Users`` with fixed trajectories, whatever the policy."""

    first: Trajectories

    def meet(self, number: int, *_: Any) -> Trajectories:
        return self.first if number == 0 else _later(number)


class _Unwritten:
    """A replacement of a ledger that keeps the charged releases in memory."""

    def __init__(self) -> None:
        self.charged: list[Release] = []

    def charge(self, release: Release) -> None:
        self.charged.append(release)


@dataclass(frozen=True)
class _Runs:
    """Runs that the attacker makes, and the releases that they charged.

    Attributes:
        learner: learner of the audited method.
        silent: learner of the same method without noise.
        updates: number of updates in each run.
        entropy: source of the noise.
        charged: releases that runs charged.
    """

    learner: _Learner
    silent: _Learner
    updates: int
    entropy: Entropy
    charged: set[Release] = field(default_factory=set)

    @classmethod
    def of(cls, method: Dppg, updates: int, entropy: Entropy) -> _Runs:
        return cls(_Learner(method), _Learner(replace(method, noise_multiplier=0.0)), updates, entropy)

    def known(self, scene: UpdateScene) -> Fit:
        """The score of an attacker who computes the release without noise; the noise's law is public."""
        inside, outside = (self._run(self.silent, _streams(scene, world))[0] for world in (True, False))
        ones = np.ones_like(inside)
        return Fit((inside, outside), (ones, ones), power=2)

    def seen(self, scene: UpdateScene, world: bool, count: int, meter: Meter) -> NDArray[np.float64]:
        """(count, coordinates) all numbers that ``count`` runs release, in units of the noise that is charged."""
        rows, streams = [], _streams(scene, world)
        for _ in range(count):
            row, charged = self._run(self.learner, streams)
            rows.append(row)
            self.charged.update(charged)
            meter.update(meter.done + 1)
        return np.stack(rows)

    def _run(self, learner: _Learner, streams: dict[str, Any]) -> tuple[NDArray[np.float64], list[Release]]:
        """The releases of a run's updates, and their charges, by the code of runs."""
        state, register, rows = learner.start(), UserRegister(), []
        ledger: Any = _Unwritten()
        radii = {"policy": _TRAINING.radius, "critic": _TRAINING.critic_radius}
        multipliers = dict(zip(radii, learner.method.multipliers, strict=False))
        for number in range(self.updates):
            release = partial(release_means, learner.method, number, _USERS, ledger, self.entropy)
            state = step(learner, state, number, streams, register, release)
            for name, released in state.last.items():
                unit = radii[name] * (multipliers[name] or 1.0) / _USERS
                rows.append(released.double().numpy() / unit)
        return np.concatenate(rows), ledger.charged


def _streams(scene: UpdateScene, world: bool) -> dict[str, Any]:
    """The users of a run, and the simulated ones, whose trajectories are the same in both worlds."""
    return {"users": _Stream(_first(scene, world)), "public": _Stream(_later(0))}


def _first(scene: UpdateScene, world: bool) -> Trajectories:
    """The trajectories of the first update; the attacker's user has the last slot."""
    rewards = torch.full((_USERS, _STEPS), 0.0 if scene.others is None else scene.others)
    rewards[-1] = scene.reward
    taken = torch.full((_USERS, _STEPS), scene.others is not None)
    taken[-1] = world
    return _trajectories(rewards, taken, 0)


def _later(number: int) -> Trajectories:
    """The trajectories of a later update, without rewards, so that only the state can move the policy."""
    return _trajectories(torch.zeros(_USERS, _STEPS), torch.ones(_USERS, _STEPS, dtype=torch.bool), number)


def _trajectories(rewards: torch.Tensor, took_step: torch.Tensor, number: int) -> Trajectories:
    """Trajectories of users who take action 0 in one state, and are in another state ever after."""
    features = torch.zeros(_USERS, _STEPS + 1, _FEATURES)
    features[:, 0, 0], features[:, 1:, 1] = 1.0, 1.0
    never = torch.zeros(_USERS, _STEPS, dtype=torch.bool)
    users = tuple(range(number * _USERS, (number + 1) * _USERS))
    return Trajectories(users, features, never.long(), torch.where(took_step, rewards, 0.0), never, never, took_step)
