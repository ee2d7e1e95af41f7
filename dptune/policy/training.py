"""DP policy gradient from top to bottom: K new users an update, and nothing leaves an update but its noisy mean.

trajectories = users.meet(number, policy)               # under the released policy; each user once
updates      = clip(what each user computes from their own trajectory and released values)
ledger.charge(method.release(number))                   # on disk before the noisy value exists
released     = mean of the updates + noise              # the policy's and the critic's, one Gaussian mechanism
policy      += server_step * released
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from dptune.errors import ConfigError
from dptune.files import replacing, write_json
from dptune.policy.aggregate import noisy_means
from dptune.policy.environments import Environment, Interface
from dptune.policy.evaluation import mean_return
from dptune.policy.local import Steps, gradients, local_updates, normalised, policy_loss, value_loss
from dptune.policy.method import Dppg
from dptune.policy.policies import Linear, Perceptron, Policy
from dptune.policy.public import fisher_extent, fit_values
from dptune.policy.rollout import Met, Trajectories, Users, advantages
from dptune.policy.trust_region import Update, kl_radius, l2_radius
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger, RunHeader

LEDGER, STATE, PROGRESS = "ledger.jsonl", "state.safetensors", "progress.json"
_USERS, _PUBLIC, _EVALUATION = 1, 2, 3  # streams of one public seed


@dataclass(frozen=True, kw_only=True)
class Training:
    """The public schedule of a run. Defaults are the paper's for classical control (its table 3).

    Attributes:
        algorithm: ppo (deep DPPG: local PPO steps), or a policy gradient with one step whose radius is that of a trust
            region: l2 (DPPG-L2) or kl (DPPG-KL, with the Fisher matrix of public simulated users).
        users: K, users an update.
        steps: T, steps a user.
        updates: releases to make.
        hidden: units in each of the policy's two layers; 0 is a linear policy.
        form: of a linear policy, see ``dptune.policy.policies.Linear``.
        discount, decay: gamma, and lambda of the advantages.
        learning_rate, epochs, minibatches: of the local steps, and of the critic's.
        radius: S, clip radius of the policy's update (ppo).
        entropy_weight: of the local loss.
        warm_moments: start every user's Adam from the last released update (appendix C.2.3), else from zero.
        normalise: each user's own advantages.
        server_step: what the released mean is multiplied by (ppo).
        critic_hidden: units in each of the critic's two layers; 0 is a linear critic.
        critic_radius: clip radius of the critic's update.
        critic_learning_rate: of its local steps.
        value_scale: what the critic's output is multiplied by; about the size of returns.
        step_size, step_every, step_divisor, least_step: eta of l2 and kl: divided by ``step_divisor`` every
            ``step_every`` users, at least ``least_step`` (its table 2).
        trust, miss: alpha and beta of the trust region (l2, kl).
        fisher_episodes, fisher_regulariser: of the public Fisher matrix (kl).
        continuing: let episodes span updates, as public code does; the run then ends with an error.
        evaluate_every, evaluate_episodes: updates between points of the curve, and simulated episodes behind each.
        seed: of initial parameters and of simulated users; public.
    """

    algorithm: Literal["ppo", "l2", "kl"] = "ppo"
    users: int = 8
    steps: int = 64
    updates: int = 100
    hidden: int = 64
    form: Literal["outer", "additive"] = "outer"
    discount: float = 0.99
    decay: float = 0.85
    learning_rate: float = 7.26e-4
    epochs: int = 8
    minibatches: int = 2
    radius: float = 0.05
    entropy_weight: float = 0.36
    warm_moments: bool = True
    normalise: bool = True
    server_step: float = 1.0
    critic_hidden: int = 64
    critic_radius: float = 0.3
    critic_learning_rate: float = 7.26e-4
    value_scale: float = 1.0
    step_size: float = 12.0
    step_every: int = 50
    step_divisor: float = 5.0
    least_step: float = 0.06
    trust: float = 3.5
    miss: float = 0.4
    fisher_episodes: int = 25
    fisher_regulariser: float = 1e-3
    continuing: bool = False
    evaluate_every: int = 10
    evaluate_episodes: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")
        if self.algorithm == "ppo" and self.users == 1:
            problem = "1: one user's clipped update drowns in noise of z radii in every direction"
            raise ConfigError("users", problem, fix="use 8 or more, or algorithm l2 or kl, whose radius allows for it")

    def step_size_at(self, number: int) -> float:
        """eta of update ``number`` of l2 and kl, by the count of users alone."""
        return max(self.step_size / self.step_divisor ** (number * self.users // self.step_every), self.least_step)


_COUNTS = (
    *("users", "steps", "updates", "epochs", "minibatches"),
    *("step_every", "fisher_episodes", "evaluate_every", "evaluate_episodes"),
)
_POSITIVE = (
    *("learning_rate", "radius", "server_step", "critic_radius", "critic_learning_rate", "value_scale"),
    *("step_size", "step_divisor", "least_step", "trust", "fisher_regulariser"),
)


@dataclass
class State:
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


class Learner:
    """The parts of a run that do not change from update to update."""

    def __init__(self, interface: Interface, method: Dppg, training: Training) -> None:
        self.method, self.training = method, training
        self.policy = policy_for(interface, training)
        inner = (training.critic_hidden,) * 2 if training.critic_hidden else ()
        self.critic = Perceptron((interface.features, *inner, 1))

    def start(self) -> State:
        """Public."""
        generator = torch.Generator().manual_seed(self.training.seed + 1)
        return State(self.policy.initial(self.training.seed), self.critic.initial(generator, last_gain=1.0))

    def values(self, state: State, features: torch.Tensor) -> torch.Tensor:
        """(K, T + 1) by the critic, zero without one."""
        if self.method.critic == "none":
            return torch.zeros(features.shape[:2])
        return self.critic(state.critic, features).squeeze(-1) * self.training.value_scale

    def updates(self, state: State, met: Trajectories, number: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(each block's (K, parameters) updates before the last clip; the returns): private."""
        training = self.training
        decay = 1.0 if self.method.critic == "none" else training.decay
        gains, returns = advantages(met, self.values(state, met.features), training.discount, decay)
        if training.normalise:
            gains = normalised(gains, met.taken)
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

    def released(self, state: State, blocks: list[torch.Tensor], radius: float, size: float, entropy: Entropy) -> State:
        """What goes to the next update: the state moved by the noisy means of ``updates``. Charge the ledger first."""
        radii = (radius, self.training.critic_radius)[: len(blocks)]
        means = noisy_means(blocks, radii, self.method.multipliers, entropy)
        after = State(state.policy + size * means[0], state.critic, {"policy": means[0]})
        if self.method.critic == "private":
            after.critic, after.last["critic"] = state.critic + means[1], means[1]
        return after

    def fitted(self, state: State, met: Trajectories, returns: torch.Tensor) -> torch.Tensor:
        """The critic after training on trajectories as they are: simulated ones, or, where it is raw, the users'."""
        return fit_values(self.critic, state.critic, met, returns, self.training)

    def _local(
        self, loss: Any, start: torch.Tensor, data: Any, met: Trajectories, name: str, state: State, number: int
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

    def radius(self, state: State, number: int, public: Users | None) -> tuple[float, float]:
        """(clip radius, step size) of the policy's update: public."""
        training, noise = self.training, self.method.multipliers[0]
        if training.algorithm == "ppo":
            return training.radius, training.server_step
        eta = training.step_size_at(number)
        # Without noise the trust region has no noise to allow for; the smallest that counts as one.
        update = Update(eta, noise or 1e-6, self.policy.size, training.users)
        if training.algorithm == "l2":
            return l2_radius(update, training.trust, training.miss), eta
        assert public is not None
        met = public.meet(number, self.policy, state.policy)
        largest, trace = fisher_extent(self.policy, state.policy, met, training.fisher_regulariser)
        return kl_radius(update, training.trust, training.miss, largest=largest, trace=trace), eta


def policy_for(interface: Interface, training: Training) -> Policy:
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
    training: Training,
    header: RunHeader,
    directory: Path,
    entropy: Entropy,
    on_point: Callable[[Point], None] = lambda point: None,
) -> tuple[State, list[Point]]:
    """Train a policy on a stream of simulated users, resuming what ``directory`` holds of the run.

    Guarantee: every policy (and private critic) along the way is a function of the releases that the ledger lists,
    charged before they were made, and of public values. (certified, delta)-DP for one user, whose slot is zeroed; a
    user is a fixed response to whatever policies they meet (spec, 5.5), and others see no action of theirs. Private:
    trajectories and what each user computes. With a raw critic none of this holds, and the ledger says so.

    Args:
        directory: receives ledger.jsonl, state.safetensors and progress.json.
        on_point: called with every point of the curve.

    Raises: ConfigError, LedgerError, BudgetError; UserReuseError if a user would be in two updates.
    """
    learner = Learner(Interface.of(environment), method, training)
    planned = method.planned(training.updates)
    existing = (directory / LEDGER).exists()
    ledger = (
        Ledger.resume(directory / LEDGER, planned) if existing else Ledger.create(directory / LEDGER, header, planned)
    )
    with ledger:
        state, points = _load(directory) if (directory / PROGRESS).exists() else (learner.start(), [])
        met, streams = Met(), streams_of(environment, training)
        # Charged updates that were lost with their process are not made again: their users have been met.
        for number in range(ledger.releases, training.updates):
            state = step(learner, state, number, streams, met, ledger, entropy)
            if (number + 1) % training.evaluate_every == 0 or number + 1 == training.updates:
                points.append(evaluate(environment, learner, state, number + 1))
                on_point(points[-1])
                _save(directory, state, points)
        ledger.finish()
    for stream in streams.values():
        stream.close()
    return state, points


def streams_of(environment: Environment, training: Training) -> dict[str, Users]:
    """The users, and simulated ones, who are nobody."""
    seed, count = 10 * training.seed, training.fisher_episodes if training.algorithm == "kl" else training.users
    return {
        "users": Users(environment, training.users, training.steps, seed + _USERS, training.continuing),
        "public": Users(environment, count, training.steps, seed + _PUBLIC),
    }


def step(
    learner: Learner, state: State, number: int, streams: dict[str, Users], met: Met, ledger: Ledger, entropy: Entropy
) -> State:
    """One update: what the users of this number change."""
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


def evaluate(environment: Environment, learner: Learner, state: State, updates: int) -> Point:
    """The mean return of simulated episodes that belong to no user."""
    training = learner.training
    seed = 10 * training.seed + _EVALUATION
    returns = mean_return(environment, learner.policy, state.policy, training.evaluate_episodes, seed)
    return Point(updates, updates * training.users, float(returns.mean()), float(returns.std(unbiased=False)))


def _save(directory: Path, state: State, points: list[Point]) -> None:
    """State first: a process that dies between the two leaves older points, never a newer claim."""
    tensors = {"policy": state.policy, "critic": state.critic} | {f"last.{key}": it for key, it in state.last.items()}
    with replacing(directory / STATE) as temporary:
        save_file(tensors, temporary)
    write_json(directory / PROGRESS, [vars(point) for point in points])


def _load(directory: Path) -> tuple[State, list[Point]]:
    tensors = load_file(directory / STATE)
    last = {key.removeprefix("last."): value for key, value in tensors.items() if key.startswith("last.")}
    points = [Point(**values) for values in json.loads((directory / PROGRESS).read_text(encoding="utf-8"))]
    return State(tensors["policy"], tensors["critic"], last), points
