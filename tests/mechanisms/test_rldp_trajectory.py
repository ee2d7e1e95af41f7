"""RLDP's controllers beside their scalar transcriptions: whole trajectories, killed and resumed in the middle.

The agents are the mechanisms' own. What they did is recorded, and played to the transcription, which checks what it
shows them; so knobs, states, rewards and replay are compared, and when each was asked for what. One SAC round has a
transcription of its own.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mechanism_steps import EXPECTED, RATE, SIZES, batch_of, observed, privatised, started
from rldp_by_hand import Decisions, ProvableRldp, PublishedRldp
from sac_by_hand import Adam, Weights, sac_round, shapes

from dptune.mechanisms.agents.rl import LearnedControl
from dptune.mechanisms.agents.sac import SacOptions, SoftActorCritic
from dptune.mechanisms.interfaces import Observation, RunFacts
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

STEPS, KILLED_AFTER = 400, 230
PAIRS = len(SIZES)


class Script:
    """Plays an agent's recorded calls to a transcription, in the order in which they were made."""

    def __init__(self, rounding: float = 1e-6) -> None:
        self.rounding = (
            rounding  # of states: those of agents are float32, and so are the releases behind the provable ones
        )
        self.calls: list[tuple[str, Any]] = []

    def _next(self, name: str) -> Any:
        called, what = self.calls.pop(0)
        assert called == name, f"the mechanism calls {called} where the transcription calls {name}"
        return what

    def act(self, state: list[float]) -> list[float]:
        shown, action = self._next("act")
        assert shown == pytest.approx(state, rel=self.rounding, abs=self.rounding)
        return list(action)

    def remember(self, state: list[float], action: list[float], reward: float, next_state: list[float]) -> None:
        before, did, earned, after = self._next("remember")
        assert before == pytest.approx(state, rel=self.rounding, abs=self.rounding)
        assert after == pytest.approx(next_state, rel=self.rounding, abs=self.rounding)
        assert did == action
        # 1 + the ratio of equation 18: its logarithm, near the floor, would magnify an epsilon's last bit.
        assert math.exp(earned) == pytest.approx(math.exp(reward), rel=1e-12, abs=1e-12)

    def improve(self) -> None:
        self._next("improve")


def recorded(controller: LearnedControl, script: Script) -> None:
    """Record what a controller asks of its agent, from now on."""
    agent = controller._agent or controller._new_agent()
    controller._agent = agent
    act, remember, improve = agent.act, agent.remember, agent.improve

    def acting(state: torch.Tensor) -> torch.Tensor:
        action: torch.Tensor = act(state)
        script.calls.append(("act", (state.tolist(), action.tolist())))
        return action

    def remembering(state: torch.Tensor, action: torch.Tensor, reward: float, after: torch.Tensor) -> None:
        script.calls.append(("remember", (state.tolist(), action.tolist(), reward, after.tolist())))
        remember(state, action, reward, after)

    def improving() -> None:
        script.calls.append(("improve", None))
        improve()

    agent.act, agent.remember, agent.improve = acting, remembering, improving


def resumed(mechanism: Mechanism, fresh: Mechanism) -> Mechanism:
    """A new process that goes on from what the first one's checkpoint holds: tensors, and JSON."""
    state = mechanism.controller.state_dict()
    tensors = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    others = json.loads(json.dumps({key: value for key, value in state.items() if key not in tensors}))
    fresh.controller.load_state_dict(others | tensors)
    return fresh


def batch(rng: np.random.Generator, step: int) -> PairGradients | None:
    """None for an empty batch: the first, two in a row at decisions of both intervals, and by chance."""
    units = 0 if step in (1, 111, 112, 335, 336) else int(rng.poisson(6))
    if not units:
        return None
    scale = 0.3 * math.exp(1.5 * math.sin(step / 40))
    rows = scale * rng.standard_normal((units, sum(SIZES))) * np.exp(rng.standard_normal((units, 1)))
    rows[0] *= step % 7 > 0  # sometimes a unit without a gradient
    return batch_of(rows, 3 - step / STEPS + 0.2 * rng.standard_normal(units))


@pytest.mark.one_case("50-112-0", "0-16-1")
@pytest.mark.parametrize(("warmup", "interval", "seed"), [(50, 112, 0), (3, 4, 0), (3, 4, 1), (8, 8, 0), (0, 16, 1)])
def test_the_published_controller_is_algorithm_one(warmup: int, interval: int, seed: int) -> None:
    options = {"warmup": warmup, "interval": interval, "pair_radius": 0.1, "seed": seed}

    def fresh() -> Mechanism:
        mechanism = build("rldp_published", {"noise_multiplier": 0.4355883, "pairs": PAIRS} | options)
        mechanism.start(RunFacts(SIZES, torch.device("cpu"), EXPECTED, RATE, STEPS, 2.0, 1e-5))
        return mechanism

    mechanism, script, rng = fresh(), Script(), np.random.default_rng(seed)
    by_hand = PublishedRldp(PAIRS, 0.1, 0.4355883, RATE, 1e-5, 2.0, interval, warmup, script)
    recorded(mechanism.controller, script)
    moved: set[int] = set()
    before = mechanism.knobs()
    for step in range(1, STEPS + 1):
        knobs, (radii, sigma) = mechanism.knobs(), by_hand.knobs()
        assert knobs.radii == pytest.approx(radii, rel=1e-12), f"release {step}"
        assert knobs.noise_multiplier == pytest.approx(sigma, rel=1e-12)
        moved |= set() if knobs == before else {step - 1}
        before = knobs
        one = batch(rng, step)
        released = privatised(mechanism, [one] if one else [], seed=step)
        assert released.knobs == knobs
        mechanism.controller.observe(observed(released, step))
        by_hand.step(one.norms().tolist() if one else [], one.losses().tolist() if one else [])
        assert not script.calls, "the mechanism asked its agent for more"
        if step == KILLED_AFTER:
            mechanism = resumed(mechanism, fresh())
            recorded(mechanism.controller, script)
    assert by_hand.decision_steps == [step for step in range(warmup + 1, STEPS + 1) if step % interval == 0]
    # Medians and actions move radii, and nothing else does; few of them leave radii where they were, by the cap.
    may_move = {*range(2, warmup + 1), *by_hand.decision_steps} - {STEPS}
    assert moved <= may_move
    assert len(moved) > 0.7 * len(may_move)
    same_memory(mechanism, by_hand)


def same_memory(mechanism: Mechanism, by_hand: Decisions, rounding: float = 1e-6) -> None:
    """Rewards and replay of an agent are the transcription's; states are kept in float32."""
    memory = mechanism.controller.state_dict()
    kept = [math.exp(reward) for reward in memory["agent.memory.rewards"]]
    assert kept == pytest.approx([math.exp(reward) for reward in by_hand.rewards], rel=1e-12, abs=1e-12)
    assert len(by_hand.buffer) == len(by_hand.actions) - 1
    for name, column in (("states", 0), ("actions", 1), ("next_states", 3)):
        rows = memory[f"agent.memory.{name}"].tolist()
        for row, expected in zip(rows, by_hand.buffer, strict=True):
            assert row == pytest.approx(expected[column], rel=rounding, abs=rounding)


@pytest.mark.one_case("initial-50-112", "one-16-16")
@pytest.mark.parametrize(("warmup", "interval"), [(50, 112), (3, 4), (16, 16)])
@pytest.mark.parametrize("centre", ["initial", "one"])
def test_the_provable_controller_is_its_page(warmup: int, interval: int, centre: str) -> None:
    """Design A. The transcription is shown the releases; the mechanism's own batches are private."""
    options = {"warmup": warmup, "interval": interval, "pair_radius": 0.1, "centre": centre}

    def fresh() -> Mechanism:
        mechanism = build("rldp", {"noise_multiplier": 0.8, "pairs": PAIRS} | options)
        mechanism.start(RunFacts(SIZES, torch.device("cpu"), EXPECTED, RATE, STEPS, 2.0, 1e-5))
        return mechanism

    mechanism, script, rng = fresh(), Script(1e-5), np.random.default_rng(warmup)
    by_hand = ProvableRldp([0.1] * PAIRS, 0.8, 2.0, STEPS, script, interval, warmup, centre)
    recorded(mechanism.controller, script)
    for step in range(1, STEPS + 1):
        knobs, (radii, weights, sigma) = mechanism.knobs(), by_hand.knobs()
        assert knobs.radii == pytest.approx(radii, rel=1e-12), f"release {step}"
        assert (knobs.weights or [PAIRS**-0.5] * PAIRS) == pytest.approx(weights, rel=1e-12)
        assert knobs.noise_multiplier == sigma
        one = batch(rng, step)
        released = privatised(mechanism, [one] if one else [], seed=step)
        figures = {name: (0.1 + rng.random(PAIRS)).tolist() for name in ("second_moment", "product", "momentum")}
        spent, loss = step / STEPS, 3 - step / STEPS + 0.1 * math.sin(step)
        public = partial(Observation, step, released, spent)
        mechanism.controller.observe(public(lambda loss=loss: loss, lambda figures=figures: figures))
        blocks = [block.tolist() for block in released.blocks]
        by_hand.step(blocks, released.deviations, EXPECTED, spent, loss, figures)
        assert not script.calls, "the mechanism asked its agent for more"
        if step == KILLED_AFTER:
            mechanism = resumed(mechanism, fresh())
            recorded(mechanism.controller, script)
    assert by_hand.decision_steps == [t for t in range(1, STEPS + 1) if mechanism.controller.acts_at(t)]
    same_memory(mechanism, by_hand, 1e-5)


def test_the_steps_of_a_published_run_are_those_of_the_paper() -> None:
    """T_warm 50, T_RL 112: actions after 112 and 224, not after 162."""
    controller: LearnedControl = started("rldp_published").controller  # type: ignore[assignment]
    assert [step for step in range(1, 337) if controller.acts_at(step)] == [112, 224, 336]
    firsts = {
        interval: next(step for step in range(1, 200) if step > 50 and step % interval == 0)
        for interval in (16, 32, 48, 64, 72, 80, 96, 112)
    }
    assert list(firsts.values()) == [64, 64, 96, 64, 72, 80, 96, 112]


def in_the_transcriptions_names(agent: SoftActorCritic, actions: int) -> Weights:
    """The agent's weights, by the names of ``sac_by_hand.shapes``."""
    online, target = agent.networks.state_dict(), agent._target.state_dict()
    critics = agent.networks.critics.state_dict()
    named = {"encoder.linear1": "encoder.0", "encoder.norm1": "encoder.1", "encoder.linear2": "encoder.3"}
    named |= {"encoder.norm2": "encoder.4"}
    weights: Weights = {}
    for kind in ("weight", "bias"):
        weights |= {f"{ours}.{kind}": online[f"{theirs}.{kind}"].clone() for ours, theirs in named.items()}
        head = online[f"head.{kind}"].clone()
        weights |= {f"actor.mean.{kind}": head[:actions], f"actor.log_deviation.{kind}": head[actions:]}
        for label, networks in (("critic", critics), ("target", target)):
            for number in (0, 1):
                for layer, place in (("hidden", 0), ("out", 2)):
                    key = f"{number}.{place}.{kind}"
                    weights[f"{label}{number + 1}.{layer}.{kind}"] = networks[key].clone()
    return weights


def test_rounds_of_the_agent_are_equations_22_to_27() -> None:
    """Six transitions, so that the first round has one and the last six to draw four from; in double precision."""
    states, actions = 11, 4
    agent = SoftActorCritic(states, actions, SacOptions(batch_size=4, rounds=2), seed=3)
    agent.networks.double()
    agent._target.double()
    weights, adam, generator = in_the_transcriptions_names(agent, actions), Adam(), torch.Generator().manual_seed(5)
    assert {name: tuple(value.shape) for name, value in weights.items()} == shapes(states, actions)
    memory: list[tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]] = []
    for number in range(6):
        before, did, after = (torch.randn(size, generator=generator).double() for size in (states, actions, states))
        memory.append((before, did, 0.5 * number - 1.25, after))
        agent.remember(*memory[-1])
        coins = torch.Generator()
        coins.set_state(agent._generator.get_state())
        agent.improve()
        for _ in range(2):
            chosen = torch.randint(len(memory), (4,), generator=coins).tolist()
            next_noise, fresh_noise = (torch.randn(4, actions, generator=coins) for _ in range(2))
            columns = [torch.stack([memory[index][place] for index in chosen]) for place in (0, 1, 3)]  # type: ignore[misc]
            rewards = torch.tensor([memory[index][2] for index in chosen])
            weights, adam = sac_round(
                weights, adam, columns[0], columns[1], rewards, columns[2], next_noise, fresh_noise
            )
        learned = in_the_transcriptions_names(agent, actions)
        for name, value in weights.items():
            torch.testing.assert_close(
                learned[name], value, rtol=1e-10, atol=1e-12, msg=lambda why, name=name: name + why
            )
