"""Users' updates: within the radius, independent of other users, and equal to those of reference code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_helpers import INTERFACE, learner, trajectories
from torch.func import grad, vmap

from dptune.policy.environments.environment import advantages
from dptune.policy.environments.learner import PolicyState, gradients, policy_loss
from dptune.policy.policies import Linear, Perceptron, Policy
from dptune.policy.user_updates import Steps, local_updates, normalise_advantages

POLICY = Policy(Perceptron((3, 4, 2)), 2, False)


@given(st.integers(0, 10_000), st.sampled_from(["none", "private"]), st.booleans(), st.sampled_from(["ppo", "l2"]))
@settings(max_examples=25, deadline=None)
def test_a_users_update_does_not_depend_on_other_users(seed: int, critic: str, warm: bool, algorithm: str) -> None:
    """All trajectories but user 0's change to absurd values, and user 0's rows stay the same."""
    it = learner(critic, algorithm=algorithm, warm_moments=warm)
    start = it.start()
    state = PolicyState(start.policy, start.critic, {"policy": 0.01 * torch.ones_like(start.policy)})
    one, other = trajectories(4, 6, seed), trajectories(4, 6, seed + 1)
    mixed = {name: torch.cat([getattr(one, name)[:1], getattr(other, name)[1:]]) for name in _TENSORS}
    mixed["rewards"][1:] = torch.tensor([1e30, float("nan"), -float("inf")])[:, None]
    before, _ = it.updates(state, one, seed)
    after, _ = it.updates(state, replace(one, **mixed), seed)
    for block, changed in zip(before, after, strict=True):
        assert torch.allclose(block[0], changed[0], atol=1e-6, rtol=1e-5)


_TENSORS = ("features", "actions", "rewards", "terminated", "episode_ends", "step_mask")


@given(st.integers(0, 1000), st.floats(1e-3, 10), st.floats(1e-4, 10))
@settings(max_examples=25, deadline=None)
def test_updates_stay_within_the_radius(seed: int, radius: float, rate: float) -> None:
    met, start = trajectories(3, 5, seed), POLICY.initial(seed)
    data = (met.features[:, :-1], met.actions, torch.zeros(3, 5), 1e6 * met.rewards)
    steps = Steps(rate, 3, 2, radius)
    moved = local_updates(policy_loss(POLICY, 0.1), start, data, met.step_mask, steps, torch.Generator().manual_seed(0))
    assert float(moved.norm(dim=1).max()) <= radius * (1 + 1e-6)
    assert bool((moved != 0).any())


@pytest.mark.parametrize("warm", [False, True])
def test_a_null_user_does_not_move_even_with_momentum(warm: bool) -> None:
    it = learner("private")
    start = it.start()
    last = {"policy": torch.ones_like(start.policy), "critic": torch.ones_like(start.critic)}
    met = trajectories(4, 6)
    met.step_mask[2] = False
    blocks, _ = it.updates(PolicyState(start.policy, start.critic, last if warm else {}), met, 0)
    assert all(bool((block[2] == 0).all()) and bool((block[1] != 0).any()) for block in blocks)


def test_a_user_whose_rewards_are_no_numbers_does_not_move() -> None:
    it, met = learner("none"), trajectories(4, 6)
    met.rewards[1] = float("nan")
    (block,), _ = it.updates(it.start(), met, 0)
    assert bool((block[1] == 0).all())
    assert bool(block.isfinite().all())


def test_one_adam_step_is_adams() -> None:
    """The first step from zero moments equals that of ``torch.optim.Adam``."""
    met, start = trajectories(1, 5), POLICY.initial(0)
    old = POLICY.log_probability(start, met.features[:, :-1], met.actions).detach()
    data = (met.features[:, :-1], met.actions, old, met.rewards)
    loss = policy_loss(POLICY, 0.2)
    mine = local_updates(loss, start, data, met.step_mask, Steps(0.01, 3, 1, 1e9), torch.Generator().manual_seed(0))
    theirs = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([theirs], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss(theirs[None], data, met.step_mask.float()).sum().backward()
        optimizer.step()
    assert torch.allclose(mine[0].float(), theirs.detach() - start, atol=1e-6)


def test_updates_are_those_of_torch_func() -> None:
    """Shared tensors give the same gradients as ``torch.func.vmap`` over a single user's loss."""
    met, parameters = trajectories(3, 5), POLICY.initial(1)

    def gain(moved, features, actions, gains, taken):  # type: ignore[no-untyped-def]
        return (POLICY.log_probability(moved, features, actions) * gains * taken).sum() / taken.sum()

    mapped = vmap(grad(gain), in_dims=(None, 0, 0, 0, 0))
    expected = mapped(parameters, met.features[:, :-1], met.actions, met.rewards, met.step_mask.float())
    assert torch.allclose(gradients(POLICY, parameters, met, met.rewards), expected, atol=1e-6)


def test_advantages_without_a_critic_are_rewards_to_go_within_each_episode() -> None:
    met = trajectories(1, 6)
    met.rewards[:] = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    met.episode_ends[:] = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool)
    met.step_mask[:] = torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool)
    met.terminated[:] = met.episode_ends
    gains, returns = advantages(met, torch.zeros(1, 7), 0.5, 1.0)
    assert gains[0].tolist() == [1 + 1 + 1, 2 + 2, 4, 0, 16 + 16, 32]
    assert torch.equal(gains, returns)


def test_an_episode_that_time_cut_off_is_worth_what_comes_after() -> None:
    met = trajectories(1, 2)
    met.rewards[:], met.step_mask[:] = 1.0, True
    met.episode_ends[:] = torch.tensor([True, False])
    values = torch.tensor([[10.0, 20.0, 40.0]])
    met.terminated[:] = False
    assert advantages(met, values, 0.5, 0.9)[0][0].tolist() == [1 + 10 - 10, 1 + 20 - 20]
    met.terminated[:] = met.episode_ends
    assert advantages(met, values, 0.5, 0.9)[0][0].tolist() == [1 - 10, 1 + 20 - 20]


def test_normalised_is_each_users_own() -> None:
    gains, taken = torch.randn(3, 8), torch.rand(3, 8) < 0.8
    own = normalise_advantages(gains, taken)
    alone = torch.cat([normalise_advantages(gains[user : user + 1], taken[user : user + 1]) for user in range(3)])
    assert torch.equal(own, alone)
    assert own[0][taken[0]].mean().abs() < 1e-6


def test_the_papers_additive_features_give_the_same_policy_in_all_states() -> None:
    """The state's part cancels in the softmax, so only 1 of 12 parameters matters (spec, section 4)."""
    additive = Policy(Linear(6, 2, "additive"), 2, False)
    outer = Policy(Linear(6, 2), 2, False)
    assert (additive.size, outer.size) == (8, 12)
    logits = additive.function(torch.randn(8), torch.eye(6)).softmax(dim=-1)
    assert torch.allclose(logits, logits[:1].expand(6, 2), atol=1e-6)
    assert not torch.allclose(*outer.function(torch.randn(12), torch.eye(6)).softmax(dim=-1)[:2], atol=1e-3)


@pytest.mark.parametrize(
    ("features", "actions", "continuous", "size"),
    [(4, 2, False, 4610), (6, 3, False, 4803), (17, 6, True, 5708), (11, 3, True, 5126)],
)  # fmt: skip
def test_networks_have_the_specs_sizes(features: int, actions: int, continuous: bool, size: int) -> None:
    """Sizes for CartPole, Acrobot, HalfCheetah and Hopper (spec, section 4)."""
    assert Policy(Perceptron((features, 64, 64, actions)), actions, continuous).size == size


def test_a_normal_policys_log_probability_and_entropy_are_torchs() -> None:
    policy = Policy(Perceptron((3, 4, 2)), 2, True)
    parameters = policy.initial(0) + 0.1
    features, actions = torch.randn(5, 3), torch.randn(5, 2)
    law = torch.distributions.Normal(policy.function(parameters, features), parameters[-2:].exp())
    assert torch.allclose(
        policy.log_probability(parameters, features, actions), law.log_prob(actions).sum(-1), atol=1e-5
    )
    spread = policy.entropy(parameters, features)
    assert torch.allclose(spread, law.entropy().sum(-1), atol=1e-5)
    assert INTERFACE.features == 3
