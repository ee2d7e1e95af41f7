"""The Soft Actor-Critic agent: reproducible, bounded, resumable, and able to learn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dptune.mechanisms.agents.sac import SacOptions, SoftActorCritic

torch.set_num_threads(1)

STATES, ACTIONS = 5, 3


def agent(seed: int = 0, **options: Any) -> SoftActorCritic:
    return SoftActorCritic(STATES, ACTIONS, SacOptions(**{"width": 16} | options), seed)


def state(number: int) -> torch.Tensor:
    return torch.randn(STATES, generator=torch.Generator().manual_seed(number))


def lives(one: SoftActorCritic, steps: int, first: int = 0) -> torch.Tensor:
    """Act, remember a made-up reward and improve; returns every action."""
    actions = []
    for step in range(first, first + steps):
        actions.append(one.act(state(step)))
        one.remember(state(step), actions[-1], float(step % 3) - 1.0, state(step + 1))
        one.improve()
    return torch.stack(actions)


def weights(one: SoftActorCritic, part: str) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in one.state_dict().items() if key.startswith(part)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one | other)


def test_an_action_has_its_size_and_is_finite_however_wild_the_state() -> None:
    for wild in (torch.zeros(STATES), torch.full((STATES,), 1e6), torch.full((STATES,), -1e-30)):
        action = agent().act(wild)
        assert action.shape == (ACTIONS,)
        assert bool(action.isfinite().all())
        assert not action.requires_grad


def test_the_first_actions_lie_near_zero() -> None:
    """Means near 0 and deviations near 1, so that radii start near 1. Deterministic: the seeds are fixed."""
    actions = torch.stack([agent(seed).act(state(seed)) for seed in range(60)])
    assert float(actions.mean().abs()) < 0.2
    assert 0.8 < float(actions.std()) < 1.3


def test_the_seed_decides_every_action() -> None:
    torch.manual_seed(1)
    one = lives(agent(seed=5), 12)
    torch.manual_seed(2)
    assert torch.equal(one, lives(agent(seed=5), 12))
    assert not torch.equal(one, lives(agent(seed=6), 12))


def test_the_global_generators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout masks come from them, and must stay secret; ``torch.manual_seed`` would reseed those of CUDA too."""

    def manual_seed(*_: Any) -> None:
        raise AssertionError("every generator was reseeded")

    monkeypatch.setattr(torch, "manual_seed", manual_seed)
    before = torch.get_rng_state()
    lives(agent(), 10)
    assert torch.equal(before, torch.get_rng_state())


def test_a_saved_agent_goes_on_as_if_nothing_had_happened() -> None:
    one, other = agent(seed=3), agent(seed=99)
    lives(one, 9)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(lives(one, 9, first=9), lives(other, 9, first=9))
    assert same(weights(one, "online"), weights(other, "online"))
    assert same(weights(one, "target"), weights(other, "target"))


@pytest.mark.parametrize("lost", ["critic_optimizer", "actor_optimizer", "generator", "memory", "target"])
def test_every_part_of_the_state_matters(lost: str) -> None:
    """Without it the agent would go on differently: the round trip above is no accident."""
    one, other = agent(seed=3), agent(seed=99)
    lives(one, 9)
    saved, untouched = copy.deepcopy(one.state_dict()), agent(seed=7).state_dict()
    kept = {key: value for key, value in saved.items() if not key.startswith(lost)}
    other.load_state_dict({key: value for key, value in untouched.items() if key.startswith(lost)} | kept)
    lives(one, 9, first=9)
    lives(other, 9, first=9)
    assert not same(weights(one, "online"), weights(other, "online"))


def test_a_young_agent_has_a_state_too() -> None:
    one, other = agent(seed=3), agent(seed=4)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert torch.equal(lives(one, 8), lives(other, 8))


def test_one_transition_is_enough_for_a_round_and_none_is_an_error() -> None:
    """Transitions are drawn with replacement: Algorithm 1 has no line that waits until there are B_SAC of them."""
    one = agent(batch_size=4)
    with pytest.raises(ValueError, match="remembers nothing"):
        one.improve()
    before = weights(one, "online")
    lives(one, 1)
    assert not same(before, weights(one, "online"))


def test_no_rounds_leave_the_policy_as_it_is() -> None:
    one = agent(rounds=0)
    before = weights(one, "online")
    lives(one, 8)
    assert same(before, weights(one, "online"))


def test_the_buffer_forgets_the_oldest_beyond_its_capacity() -> None:
    one = agent(capacity=5, rounds=0)
    lives(one, 12)
    kept = one.state_dict()["memory.states"]
    assert torch.equal(kept, torch.stack([state(step) for step in range(7, 12)]))
    assert one.state_dict()["memory.rewards"] == [float(step % 3) - 1.0 for step in range(7, 12)]


def test_target_critics_follow_by_the_polyak_share() -> None:
    one = agent(batch_size=1, rounds=1, polyak=0.25, critic_learning_rate=0.1)
    before = weights(one, "target")
    lives(one, 1)
    online = weights(one, "online.critics")
    assert len(before) == len(online) == 8
    for key, value in weights(one, "target").items():
        expected = before[key].lerp(online[key.replace("target", "online.critics", 1)], 0.25)
        torch.testing.assert_close(value, expected)
    moved = "target.0.0.weight"
    assert not torch.equal(before[moved], weights(one, "target")[moved])


def test_the_actor_does_not_train_the_encoder() -> None:
    one = agent(critic_learning_rate=0.0, actor_learning_rate=0.01)
    before = weights(one, "online")
    lives(one, 8)
    after = weights(one, "online")
    changed = {key.split(".")[1] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"head"}


def taught(seed: int, goal: float, steepness: float, steps: int = 300, **options: Any) -> torch.Tensor:
    """200 actions of an agent whose reward was - steepness (action - goal)^2 for ``steps`` of them."""
    options |= {"discount": 0.0, "batch_size": 16, "actor_learning_rate": 1e-2, "critic_learning_rate": 1e-2}
    one = agent(seed=seed, **options)
    for step in range(steps):
        action = one.act(state(step))
        one.remember(state(step), action, -steepness * float((action - goal).square().sum()), state(step + 1))
        one.improve()
    return torch.stack([one.act(state(step)) for step in range(200)])


@pytest.mark.long
def test_temperature_keeps_actions_spread_out() -> None:
    """The seed is fixed; over 10 seeds the ratio was at least 3.0."""
    hot, cold = (float(taught(0, 0.0, 0.3, steps=100, temperature=temperature).std()) for temperature in (2.0, 0.0))
    assert hot > 1.5 * cold


@pytest.mark.one_case
@pytest.mark.parametrize("goal", [-1.0, 1.0])
def test_it_learns_what_is_rewarded(goal: float) -> None:
    """The seed is fixed; in 37 of 40 cases of 20 seeds the mean action came at least 0.25 of the way (0.8 on average),
    an untaught one stays near 0.
    """
    assert float(taught(0, goal, 1.0).mean()) * goal > 0.25


def test_a_loaded_policy_acts_like_the_one_that_was_saved() -> None:
    one, other = agent(seed=3), agent(seed=4)
    lives(one, 9)
    other.load_policy(one.policy())
    assert same(weights(one, "online"), weights(other, "online"))
    assert same(
        {key.removeprefix("online.critics"): value for key, value in weights(one, "online.critics").items()},
        {key.removeprefix("target"): value for key, value in weights(other, "target").items()},
    )


def test_a_saved_policy_does_not_change_with_the_agent() -> None:
    one = agent()
    saved = one.policy()
    before = {key: value.clone() for key, value in saved.items()}
    lives(one, 8)
    assert same(before, saved)


def test_a_policy_of_other_sizes_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        agent().load_policy(SoftActorCritic(STATES + 1, ACTIONS, SacOptions(width=16), 0).policy())
