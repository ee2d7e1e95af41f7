"""DP policy gradient from top to bottom: K new users an update, and nothing leaves an update but its noisy mean.

trajectories = users.meet(number, policy)               # under the released policy; each user once
updates      = what each user computes from their own trajectory and released values
means        = release(updates, radii)                  # charged, clipped, noised: dptune.policy.learner
policy      += means of the policy's updates            # and the critic's, in one Gaussian mechanism
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dptune.policy.environments.environment import Environment, Interface
from dptune.policy.environments.evaluation import returns_under
from dptune.policy.environments.learner import PolicyLearner, PolicyState
from dptune.policy.environments.rollout import Users, advantages
from dptune.policy.environments.schedule import PolicyTraining
from dptune.policy.learner import ReleaseMeans, updates_left
from dptune.policy.met import Met
from dptune.policy.method import Dppg
from dptune.policy.opening import is_finished, open_ledger, read_progress, save_progress
from dptune.privacy.entropy import Entropy
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader

_USERS, _PUBLIC, _EVALUATION = 1, 2, 3  # streams of one public seed
_SECONDS_BETWEEN_SAVES = 10.0


@dataclass(frozen=True)
class Point:
    """One point of the curve. Public: simulated episodes of no user, under a released policy."""

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
    """Train a policy on a stream of simulated users, resuming what ``directory`` holds of the run; a finished one is
    read.

    Guarantee: every policy (and private critic) along the way is a function of the releases that the ledger lists,
    charged before they were made, and of public values. (certified, delta)-DP for one user, whose slot is zeroed; a
    user is a fixed response to whatever policies they meet (spec, 5.5), and others see no action of theirs. Private:
    trajectories and what each user computes. With a raw critic none of this holds, and the ledger says so.

    Args:
        directory: receives ledger.jsonl, state.safetensors and progress.json.
        on_point: called with every point of the curve.

    Raises: ConfigError, LedgerError, BudgetError; UserReuseError if a user would be in two updates.
    """
    schedule = {**asdict(environment), **asdict(method), **asdict(training)}
    if is_finished(directory, header, schedule):
        return _load(directory)
    learner = PolicyLearner(Interface.of(environment), method, training)
    with open_ledger(directory, header, method.planned(training.updates), schedule, entropy) as ledger:
        state, points = _load(directory) if RunFolder(directory).progress.exists() else (learner.start(), [])
        met, streams, saved = Met(), streams_of(environment, training), time.monotonic()
        _save(directory, state, points, ledger.releases)  # before anything is charged
        for number, release in updates_left(ledger, method, training.updates, entropy):
            state = step(learner, state, number, streams, met, release)
            if (number + 1) % training.evaluate_every == 0:
                points.append(evaluate(environment, learner, state, number + 1))
                on_point(points[-1])
            if time.monotonic() - saved >= _SECONDS_BETWEEN_SAVES:
                _save(directory, state, points, ledger.releases)
                saved = time.monotonic()
        if not points or points[-1].update < training.updates:
            points.append(evaluate(environment, learner, state, training.updates))
            on_point(points[-1])
        _save(directory, state, points, ledger.releases)
        ledger.finish()
    for stream in streams.values():
        stream.close()
    return state, points


def streams_of(environment: Environment, training: PolicyTraining) -> dict[str, Users]:
    """The streams of users, and of simulated users, who stand for nobody."""
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
    met: Met,
    release: ReleaseMeans,
) -> PolicyState:
    """Make one update from the users of this number."""
    method, training = learner.method, learner.training
    trajectories = streams["users"].meet(number, learner.policy, state.policy)
    met.admit(trajectories.users)
    radius, size = learner.radius(state, number, streams["public"])
    blocks, returns = learner.updates(state, trajectories, number)
    after = learner.released(state, blocks, radius, size, release)
    if method.critic == "raw":
        after.critic = learner.fitted(state, trajectories, returns)
    elif method.critic == "public":
        simulated = streams["public"].meet(number, learner.policy, after.policy)
        _, returns = advantages(simulated, learner.values(state, simulated.features), training.discount, training.decay)
        after.critic = learner.fitted(state, simulated, returns)
    return after


def evaluate(environment: Environment, learner: PolicyLearner, state: PolicyState, updates: int) -> Point:
    """The mean return of simulated episodes that belong to no user."""
    training = learner.training
    seed = 10 * training.seed + _EVALUATION
    returns = returns_under(environment, learner.policy, state.policy, training.evaluate_episodes, seed)
    return Point(updates, updates * training.users, float(returns.mean()), float(returns.std(unbiased=False)))


def _save(directory: Path, state: PolicyState, points: list[Point], releases: int) -> None:
    save_progress(directory, state.tensors(), points, releases)


def _load(directory: Path) -> tuple[PolicyState, list[Point]]:
    tensors, points = read_progress(directory, Point)
    return PolicyState.of(tensors), points
