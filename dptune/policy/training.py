"""DP policy gradient from top to bottom: K new users an update, and nothing leaves an update but its noisy mean.

trajectories = users.meet(number, policy)               # under the released policy; each user once
updates      = clip(what each user computes from their own trajectory and released values)
ledger.charge(method.release(number))                   # on disk before the noisy value exists
released     = mean of the updates + noise              # the policy's and the critic's, one Gaussian mechanism
policy      += released
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dptune.errors import ConfigError
from dptune.files import write_json
from dptune.policy.aggregate import noisy_means
from dptune.policy.environments import Environment, Interface
from dptune.policy.evaluation import returns_under
from dptune.policy.local import Steps, gradients, local_updates, policy_loss, value_loss
from dptune.policy.method import Dppg
from dptune.policy.opening import is_finished, open_ledger, save_state
from dptune.policy.policies import Linear, Perceptron, Policy
from dptune.policy.public import fisher_extent, fit_values
from dptune.policy.rollout import Met, Trajectories, Users, advantages
from dptune.policy.schedule import PolicyTraining
from dptune.policy.trust_region import Update, kl_radius, l2_radius
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader

_USERS, _PUBLIC, _EVALUATION = 1, 2, 3  # streams of one public seed
_SECONDS_BETWEEN_SAVES = 10.0


@dataclass
class PolicyState:
    """Everything that goes from one update to the next: released values alone, unless the critic is raw."""

    policy: torch.Tensor
    critic: torch.Tensor
    last: dict[str, torch.Tensor] = field(default_factory=dict)  # the last released updates


@dataclass(frozen=True)
class Point:
    """One point of the curve. Public: simulated episodes of no user, under a released policy."""

    update: int
    users: int
    mean_return: float
    deviation: float


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
        self, state: PolicyState, blocks: list[torch.Tensor], radius: float, size: float, entropy: Entropy
    ) -> PolicyState:
        """The state of the next update, moved by the noisy means of ``updates``. Charge the ledger first."""
        radii = (radius, self.training.critic_radius)[: len(blocks)]
        means = noisy_means(blocks, radii, self.method.multipliers, entropy)
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
        # Charged updates that were lost with their process are not made again: their users have been met.
        _save(directory, state, points, ledger.releases)  # before anything is charged
        for number in range(ledger.releases, training.updates):
            state = step(learner, state, number, streams, met, ledger, entropy)
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
    ledger: Ledger,
    entropy: Entropy,
) -> PolicyState:
    """Make one update from the users of this number."""
    method, training = learner.method, learner.training
    trajectories = streams["users"].meet(number, learner.policy, state.policy)
    met.admit(trajectories.users)
    radius, size = learner.radius(state, number, streams["public"])
    blocks, returns = learner.updates(state, trajectories, number)
    ledger.charge(method.release(number))
    after = learner.released(state, blocks, radius, size, entropy)
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
    """Save the state, then the points: a process that dies in between leaves points that are too old, never too new."""
    tensors = {"policy": state.policy, "critic": state.critic} | {f"last.{key}": it for key, it in state.last.items()}
    save_state(RunFolder(directory).state, tensors, releases)
    write_json(RunFolder(directory).progress, [vars(point) for point in points])


def _load(directory: Path) -> tuple[PolicyState, list[Point]]:
    tensors = load_file(RunFolder(directory).state)
    last = {key.removeprefix("last."): value for key, value in tensors.items() if key.startswith("last.")}
    points = [Point(**values) for values in json.loads(RunFolder(directory).progress.read_text(encoding="utf-8"))]
    return PolicyState(tensors["policy"], tensors["critic"], last), points
