"""DP policy gradient in an environment: each update has K new users, and only its noisy mean leaves it.

trajectories = users.meet(number, policy)               # under the released policy; each user once
updates      = what each user computes from their own trajectory and released values
means        = release(updates, radii)                  # charged, clipped, with noise: dptune.policy.user_updates
policy      += mean of the policy's updates             # and the critic's, in one Gaussian mechanism
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.policy.environments.environment import RIVERSWIM, Environment, Interface, Users, advantages
from dptune.policy.environments.learner import PolicyLearner, PolicyState
from dptune.policy.environments.riverswim import STATES, value
from dptune.policy.method import Dppg
from dptune.policy.policies import Policy
from dptune.policy.run_files import UserRegister, is_finished, open_ledger, read_progress, save_progress
from dptune.policy.schedules import PolicyTraining
from dptune.policy.user_updates import ReleaseMeans, updates_left
from dptune.privacy.entropy import Entropy
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader

_USERS, _PUBLIC, _EVALUATION = 1, 2, 3  # streams of random numbers under one public seed
_SECONDS_BETWEEN_SAVES = 10.0


@dataclass(frozen=True)
class Point:
    """A point of the learning curve, from simulated episodes that belong to no user. Public.

    Attributes:
        update: number of updates before the evaluation.
        users: number of users in them.
        mean_return: mean undiscounted return of the episodes.
        deviation: standard deviation of the returns.
    """

    update: int
    users: int
    mean_return: float
    deviation: float


def train(
    environment: Environment,
    method: Dppg,
    training: PolicyTraining,
    header: RunHeader,
    directory: Path,
    entropy: Entropy,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[PolicyState, list[Point]]:
    """Train a policy on a stream of simulated users, or resume the run in ``directory``; a finished run is only read.

    Guarantee: the run is (certified epsilon, delta)-DP for one user whose slot becomes empty. Every policy (and private
    critic) of the run is a function of public values and of the releases in its ledger, each of which was charged
    before it was made. A user is a fixed response to the policies that they get (Vietri et al. 2020), and no
    other user sees their actions. Private: trajectories, and the updates that users compute. Public: all
    else. With a raw critic there is no guarantee, and the ledger says so.

    Args:
        header: header of the run's ledger.
        directory: receives ledger.jsonl, state.safetensors and progress.json.
        entropy: source of the noise.
        on_point: called with every point of the curve.

    Returns: the released state, and the learning curve.

    Raises: ConfigError, LedgerError, BudgetError; UserReuseError if a user would be in two updates.
    """
    schedule = {**asdict(environment), **asdict(method), **asdict(training)}
    if is_finished(directory, header, schedule):
        return _load(directory)
    learner = PolicyLearner(Interface.of(environment), method, training)
    with open_ledger(directory, header, method.planned(training.updates), schedule, entropy) as ledger:
        state, points = _load(directory) if RunFolder(directory).progress.exists() else (learner.start(), [])
        register, streams, last_save = UserRegister(), streams_of(environment, training), time.monotonic()
        _save(directory, state, points, ledger.releases)  # an unwritable disk must fail before anything is charged
        for number, release in updates_left(ledger, method, training.updates, training.users, entropy):
            state = step(learner, state, number, streams, register, release)
            if (number + 1) % training.evaluate_every == 0:
                points.append(evaluate(environment, learner, state, number + 1))
                on_point(points[-1])
            if time.monotonic() - last_save >= _SECONDS_BETWEEN_SAVES:
                _save(directory, state, points, ledger.releases)
                last_save = time.monotonic()
        if not points or points[-1].update < training.updates:
            points.append(evaluate(environment, learner, state, training.updates))
            on_point(points[-1])
        _save(directory, state, points, ledger.releases)
        ledger.finish()
    for stream in streams.values():
        stream.close()
    return state, points


def streams_of(environment: Environment, training: PolicyTraining) -> dict[str, Users]:
    """Open the stream of users, "users", and of simulated users who stand for no person, "public"."""
    seed, count = 10 * training.seed, training.fisher_episodes if training.algorithm == "kl" else training.users
    return {
        "users": Users(environment, training.users, training.steps, seed + _USERS, training.continuing),
        "public": Users(environment, count, training.steps, seed + _PUBLIC),
    }


def step(
    learner: PolicyLearner,
    state: PolicyState,
    number: int,
    streams: dict[str, Users],
    register: UserRegister,
    release: ReleaseMeans,
) -> PolicyState:
    """Run update ``number``: roll out its users, release the mean of their updates, and move the state by it.

    Raises: UserReuseError if one of its users was in an earlier update.
    """
    method, training = learner.method, learner.training
    trajectories = streams["users"].meet(number, learner.policy, state.policy)
    register.admit(trajectories.users)
    radius, size = learner.radius(state, number, streams["public"])
    blocks, returns = learner.updates(state, trajectories, number)
    after = learner.apply_release(state, blocks, radius, size, release)
    if method.critic == "raw":
        after.critic = learner.fit_critic(state, trajectories, returns)
    elif method.critic == "public":
        simulated = streams["public"].meet(number, learner.policy, after.policy)
        _, returns = advantages(simulated, learner.values(state, simulated.features), training.discount, training.decay)
        after.critic = learner.fit_critic(state, simulated, returns)
    return after


def evaluate(environment: Environment, learner: PolicyLearner, state: PolicyState, updates: int) -> Point:
    """Evaluate the policy after ``updates`` updates on simulated episodes, which belong to no user. Public."""
    training = learner.training
    seed = 10 * training.seed + _EVALUATION
    returns = returns_under(environment, learner.policy, state.policy, training.evaluate_episodes, seed)
    return Point(updates, updates * training.users, float(returns.mean()), float(returns.std(unbiased=False)))


def _save(directory: Path, state: PolicyState, points: list[Point], releases: int) -> None:
    save_progress(directory, state.tensors(), points, releases)


def _load(directory: Path) -> tuple[PolicyState, list[Point]]:
    tensors, points = read_progress(directory, Point)
    return PolicyState.of(tensors), points


_LONGEST = 100_000


@torch.no_grad()
def returns_under(
    environment: Environment, policy: Policy, parameters: torch.Tensor, episodes: int, seed: int
) -> torch.Tensor:
    """Undiscounted returns of a policy: (episodes,) simulated ones, or for Riverswim the exact expectation, (1,).

    Args:
        parameters: (size,) released parameters of the policy.
        seed: seed of environments and actions; public.
    """
    if environment.id == RIVERSWIM:
        chances = policy.function(parameters, torch.eye(STATES)).softmax(dim=-1)
        return torch.tensor([value(chances.double().numpy(), **environment.options)])
    interface, generator = Interface.of(environment), torch.Generator().manual_seed(seed)

    def act(observations: NDArray[Any]) -> NDArray[Any]:
        features = interface.encode_observations(observations)
        return interface.decode_actions(policy.sample(parameters, features, generator))

    return returns_of(environment, act, episodes, seed)


def returns_of(
    environment: Environment, act: Callable[[NDArray[Any]], NDArray[Any]], episodes: int, seed: int
) -> torch.Tensor:
    """(episodes,) undiscounted returns of whole episodes that run in parallel.

    Args:
        act: function from the observations of all episodes to their actions.

    Raises: ConfigError for an environment whose episodes do not end.
    """
    vector = environment.vector(episodes)
    observations, _ = vector.reset(seed=seed)
    returns, running = torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    for _ in range(_LONGEST):
        if not running.any():
            break
        observations, rewards, terminated, truncated, _ = vector.step(act(observations))
        returns += torch.from_numpy(rewards).float() * running
        running &= ~torch.from_numpy(terminated | truncated)
    vector.close()
    if running.any():
        problem = f"{environment.id} has episodes of more than {_LONGEST} steps"
        raise ConfigError("environment", problem, fix="set its max_episode_steps")
    return returns
