"""The base of the published and the provable RLDP: actions, reward, agent, saved hyper-policy, and how much it learns.

Only the observation differs between the two, see ``rldp_published.py`` and ``rldp.py``. ``idle_agent`` warns of a run
so short that its agent never makes a round of updates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.policy_file import SavedPolicy
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Knobs, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.privacy.release import Composition

if TYPE_CHECKING:
    import torch

#: sigma stays within these multiples of its start (RLDP section 2.4).
NOISE_RANGE = (0.5, 2.0)
_LARGEST_FEATURE = 10.0
_BATCHES_OF_MISTRAL = {0.5: 4, 2.0: 16, 4.0: 8, 5.0: 4, 8.0: 8}
_WORST_UTILITY = -100.0  # utility of a model that diverged: an infinite loss would spoil the agent


def reward(gain: float, cost: float, floor: float) -> float:
    """Utility gained per epsilon spent: log(1 + max(gain / (cost + 1e-6), -0.999)), and at least -floor."""
    return max(math.log1p(max(gain / (cost + 1e-6), -0.999)), -floor)


def moved_noise(noise: float, start: float, action: float, spent: float) -> float:
    """The next sigma, after a damped step whose size shrinks with the share of the budget that is spent.

    The step is at most 0.02 in log sigma, and 0 when all is spent; sigma stays within ``NOISE_RANGE`` of its start.
    """
    step = 0.1 * (1 - min(max(spent, 0.0), 1.0))
    low, high = (math.log(start * factor) for factor in NOISE_RANGE)
    proposal = min(max(math.log(noise) + math.tanh(action) * step, low), high)
    return math.exp(0.8 * math.log(noise) + 0.2 * proposal)


def batch_size_of_mistral(epsilon: float | None) -> int:
    """B_SAC that RLDP gives Mistral-7B at this budget (section 4.5), or at the nearest budget that the paper lists."""
    nearest = min(_BATCHES_OF_MISTRAL, key=lambda known: abs(math.log(known / (epsilon or 2.0))))
    return _BATCHES_OF_MISTRAL[nearest]


@dataclass
class Normaliser:
    """Running mean and deviation of every feature (Welford); features are clamped to 10 deviations."""

    count: int = 0
    mean: Any = None
    squares: Any = None

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Learn from these features, then return them normalised, as float32."""
        features = features.double().nan_to_num(0.0, 1e6, -1e6)
        if self.mean is None:
            self.mean, self.squares = features.new_zeros(len(features)), features.new_zeros(len(features))
        self.count += 1
        before = features - self.mean
        self.mean = self.mean + before / self.count
        self.squares = self.squares + before * (features - self.mean)
        deviation = (self.squares / self.count).sqrt().clamp(min=1e-6)
        return ((features - self.mean) / deviation).clamp(-_LARGEST_FEATURE, _LARGEST_FEATURE).float()

    @property
    def size(self) -> int:
        """Number of features; known once it was called or loaded."""
        return len(self.mean)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The learned statistics, by their names in files."""
        return {"features.mean": self.mean, "features.squares": self.squares}

    def load(self, tensors: Mapping[str, Any], count: int, features: int) -> None:
        """Restore what ``tensors`` gave. Raises KeyError if one is missing, ValueError if their length is wrong."""
        mean, squares = tensors["features.mean"], tensors["features.squares"]
        for size in (len(mean), len(squares)):
            if size != features:
                raise ValueError(f"it reads {size} features, not {features}")
        self.count, self.mean, self.squares = count, mean, squares


@dataclass
class LearnedControl(Constant):
    """A controller whose agent, SAC by default, acts every ``interval`` releases. Subclasses define when it acts, what
    it sees and what its actions do.

    One decision is lines 21 to 42 of RLDP's Algorithm 1, in their order: see the state, draw an action with the weights
    as they are, apply it, reward the action before, remember that transition, learn for K rounds. So the first action
    teaches nothing, and m actions make K (m - 1) rounds.

    Attributes:
        interval: T_RL, releases between actions.
        batch_size: B_SAC, transitions per SAC round. The paper has 4 for GPT-2 and both Llamas; 0 takes what it has for
            Mistral-7B: 4, 16, 8, 4, 8 at epsilon 0.5, 2, 4, 5, 8 (that of the nearest one for others).
        rounds: K, SAC rounds per action.
        warmup: T_warm. The published controller acts after it only; the provable one first acts when it ends.
        radius_cap: largest radius (RLDP equation 10 has 1).
        reward_floor: R_max, the reward is at least minus this; the paper gives no value, 5 is this project's.
        policy: "learned", or "random" for an agent that never improves (an ablation).
        seed: seed of the agent's networks and exploration; public.
        init_from: folder of a saved hyper-policy to start from.
        actions: how often the agent acted so far.
    """

    takes_head: ClassVar[bool] = False
    interval: int = 112
    batch_size: int = 4
    rounds: int = 2
    warmup: int = 50
    radius_cap: float = 1.0
    reward_floor: float = 5.0
    policy: Literal["learned", "random"] = "learned"
    seed: int = 0
    init_from: str = ""
    _facts: Any = field(default=None, init=False, repr=False)
    _agent: Any = field(default=None, init=False, repr=False)
    _normaliser: Any = field(default_factory=Normaliser, init=False, repr=False)
    _last: Any = field(default=None, init=False, repr=False)  # (state, action, utility, epsilon) of the last action
    _reward: float = field(default=math.nan, init=False)
    actions: int = field(default=0, init=False)
    _radii: tuple[float, ...] = field(default=(), init=False)
    _noise: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ConfigError("interval", f"{self.interval} is below 1", fix="use 1 or more")
        for name in ("batch_size", "rounds", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(name, f"{getattr(self, name)} is negative", fix="use 0 or more")
        for name in ("radius_cap", "reward_floor"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")

    @property
    def noise_range(self) -> tuple[float, float]:
        """The published bounds of sigma, ``NOISE_RANGE``."""
        return NOISE_RANGE

    def check(self, initial: Knobs, pairs: int) -> None:
        """Raise ConfigError unless there is one radius for each pair."""
        if len(initial.radii) != pairs:
            raise ConfigError("controller", "moves one radius a pair", fix="use clipper: per_pair")
        if initial.noise_multiplier <= 0:
            raise ConfigError(
                "controller", "learns from noisy releases, but the mechanism adds no noise", fix="add noise"
            )

    def start(self, facts: RunFacts) -> None:
        """Keep the public facts and load the hyper-policy. Raises ConfigError if it is of other adapters or options."""
        self._facts = facts
        if self._source is not None:
            self._agent = self._new_agent()
            self._warm_start()

    def feature_size(self, pairs: int) -> int:
        """Length of the state that the agent sees."""
        raise NotImplementedError

    def action_size(self, pairs: int) -> int:
        """Length of an action."""
        raise NotImplementedError

    def apply(self, action: list[float], spent: float) -> None:
        """Turn an action into knobs; ``spent`` is the share of the budget that is spent."""
        raise NotImplementedError

    @property
    def first_action(self) -> int:
        """The release (counted from 1) after which the agent acts for the first time; then every ``interval``."""
        raise NotImplementedError

    def acts_at(self, release: int) -> bool:
        """Whether the agent acts once this release is made."""
        return self.planned_actions(release) > self.planned_actions(release - 1)

    @property
    def learns(self) -> bool:
        """Whether its agent is meant to learn inside the run."""
        return self.policy == "learned" and self.rounds > 0 and self.agent_kind == "sac"

    def planned_actions(self, steps: int) -> int:
        """How often the agent acts in a run of ``steps`` releases."""
        return max((steps - self.first_action) // self.interval + 1, 0)

    def planned_updates(self, steps: int) -> int:
        """How many SAC rounds there are in a run of ``steps`` releases: K for every action but the first."""
        return self.rounds * max(self.planned_actions(steps) - 1, 0) if self.learns else 0

    @property
    def updates(self) -> int:
        """SAC rounds so far."""
        return self.rounds * max(self.actions - 1, 0) if self.learns else 0

    def judge(self, gain: float, cost: float) -> float:
        """The reward of an interval with this gain in utility and this cost in epsilon."""
        return reward(gain, cost, self.reward_floor)

    def act(self, features: torch.Tensor, utility: float, epsilon: float, spent: float) -> None:
        """Make one decision: lines 21 to 42 of Algorithm 1.

        Args:
            features: (size,) the state that the controller sees.
            utility: u, minus a mean log loss.
            epsilon: what the run cost so far, in the terms of the reward.
            spent: share of the budget in [0, 1], which damps the step of sigma.
        """
        utility = utility if math.isfinite(utility) else _WORST_UTILITY
        if self._agent is None:
            self._agent = self._new_agent()
        state = self._normaliser(features.cpu())
        action = self._agent.act(state)
        self.apply(action.tolist(), spent)
        self.actions += 1
        if self._last is not None:
            before, old_action, old_utility, old_epsilon = self._last
            self._reward = self.judge(utility - old_utility, epsilon - old_epsilon)
            self._agent.remember(before, old_action, self._reward, state)
            if self.policy == "learned":
                self._agent.improve()
        self._last = (state, action, utility, epsilon)

    @property
    def decision(self) -> tuple[Any, Any] | None:
        """The agent's last (state, action), or None before it acted."""
        return None if self._last is None else self._last[:2]

    def metrics(self) -> dict[str, float]:
        """Numbers of actions and SAC rounds so far, and the last reward once there is one."""
        counts = {"controller_actions": float(self.actions), "controller_updates": float(self.updates)}
        return counts if math.isnan(self._reward) else counts | {"controller_reward": self._reward}

    def _new_agent(self) -> Any:
        from dptune.mechanisms.agents.sac import SacOptions, SoftActorCritic

        batch_size = self.batch_size or batch_size_of_mistral(self._facts.epsilon)
        options = SacOptions(batch_size=batch_size, rounds=self.rounds)
        pairs = len(self._facts.pair_sizes)
        return SoftActorCritic(self.feature_size(pairs), self.action_size(pairs), options, self.seed)

    def state_dict(self) -> dict[str, Any]:
        """Agent, normaliser, last action and knobs, as a flat table."""
        state: dict[str, Any] = {"radii": list(self._radii), "noise": self._noise, "actions": self.actions}
        if math.isfinite(self._reward):
            state["reward"] = self._reward
        if self._last is not None:
            last_state, action, utility, epsilon = self._last
            state |= {f"agent.{key}": value for key, value in self._agent.state_dict().items()}
            state |= {"last.state": last_state, "last.action": action, "last.utility": utility, "last.epsilon": epsilon}
            state |= {"features.count": self._normaliser.count, **self._normaliser.tensors()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` gave; call ``start`` first."""
        self._radii, self._noise, self.actions = tuple(state["radii"]), state["noise"], int(state["actions"])
        self._reward = state.get("reward", math.nan)
        if "last.state" in state:
            self._normaliser.load(state, int(state["features.count"]), self._features_read)
            self._agent = self._new_agent()
            prefix = "agent."
            self._agent.load_state_dict(
                {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            )
            self._last = tuple(state[f"last.{name}"] for name in ("state", "action", "utility", "epsilon"))

    def saved_policy(
        self, label: str, run_id: str, unit: str, releases: Composition, leaks: tuple[str, ...]
    ) -> SavedPolicy | None:
        """The trained hyper-policy of a run, with everything that it cost; None if it never acted.

        Args:
            label: the run's label, for people.
            run_id: the id in the run's ledger.
            unit: the run's unit of privacy.
            releases: the run's own releases; those of the policy that it started from are added.
            leaks: reasons why the run has no certified epsilon.
        """
        if self._last is None:
            return None
        mine = self._normaliser
        tensors = {f"policy.{name}": value for name, value in self._agent.policy().items()}
        return SavedPolicy(
            label=label,
            run_id=run_id,
            unit=unit,
            tensors=tensors | mine.tensors(),
            features=mine.size,
            features_seen=mine.count,
            releases=releases + self.inherited,
            leaks=leaks,
            options={item.name: getattr(self, item.name) for item in fields(self) if item.init},
        )

    @cached_property
    def _source(self) -> SavedPolicy | None:
        """The hyper-policy to start from. Read once, so that the one that is priced is the one that is loaded."""
        return SavedPolicy.read(self.init_from) if self.init_from else None

    @property
    def inherited(self) -> Composition:
        """The releases that the starting hyper-policy cost one unit of this run."""
        return self._source.price if self._source else Counter()

    @property
    def inherited_unit(self) -> str | None:
        """The unit of privacy of those releases; None without a starting hyper-policy."""
        return self._source.unit if self._source else None

    @property
    def inherited_leaks(self) -> tuple[str, ...]:
        """Reasons why the starting hyper-policy has no certified epsilon."""
        return (
            tuple(f"hyper-policy of {self._source.label}: {leak}" for leak in self._source.leaks)
            if self._source
            else ()
        )

    @property
    def agent_kind(self) -> str:
        """The kind of agent; a saved hyper-policy fits only its own kind."""
        return "sac"

    @property
    def _features_read(self) -> int:
        return self.feature_size(len(self._facts.pair_sizes))

    def _warm_start(self) -> None:
        """Load the saved policy and feature statistics. Raises ConfigError if they are another agent's, or were made
        for other adapters.
        """
        assert self._source is not None
        source, mine = self._source, self.agent_kind
        if (theirs := source.options.get("agent", "sac")) != mine:
            problem = f"{self.init_from} holds a policy of agent {theirs}, and this run's is {mine}"
            raise ConfigError("init_from", problem, fix=f"set agent to {theirs}, or start from another folder")
        try:
            if source.features != self._features_read:
                raise ValueError(f"it reads {source.features} features, not {self._features_read}")
            self._agent.load_policy(
                {key.removeprefix("policy."): it for key, it in source.tensors.items() if key.startswith("policy.")}
            )
            self._normaliser.load(source.tensors, int(source.features_seen), self._features_read)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                "init_from", f"{self.init_from} does not fit this run ({error})", fix="use the same model and options"
            ) from None


def learner(mechanism: Mechanism) -> Any:
    """The controller (``LearnedControl``) whose agent is to learn inside the run; None without one.

    An agent that is random, or was trained before and stays as it is, is none: its own options say so.
    """
    controller = mechanism.controller
    learns = isinstance(controller, LearnedControl) and (controller.policy, controller.agent_kind) == ("learned", "sac")
    return controller if learns else None


def idle_agent(mechanism: Mechanism, steps: int) -> str | None:
    """A warning where the mechanism's agent would make no update in a run of ``steps`` releases; None where it does.

    An agent acts, and learns from its second action on. All of this is public.
    """
    controller = learner(mechanism)
    if controller is None or controller.planned_updates(steps):
        return None
    none = f"the agent of {mechanism.name} makes no update"
    if not controller.rounds:
        return f"{none}: its rounds are 0. Fix: set rounds to 1 or more, or policy to random"
    second = controller.first_action + controller.interval
    return (
        f"{none} in {steps} steps (at most 1 action, 0 rounds): it learns from its second action on, which comes at "
        f"step {second} with warmup {controller.warmup} and interval {controller.interval}. Fix: train for {second} "
        "steps or more (by epochs, say), or lower warmup or interval"
    )


def learning_of(mechanism: Mechanism, steps: int) -> dict[str, int]:
    """What the agent of a finished run did, and was to do in ``steps`` releases; empty without one that learns.

    ``actions`` and ``updates`` (rounds of SAC) were made; ``planned_updates`` follow from the public schedule.
    """
    controller = learner(mechanism)
    if controller is None:
        return {}
    planned = controller.planned_updates(steps)
    return {"actions": controller.actions, "updates": controller.updates, "planned_updates": planned}
