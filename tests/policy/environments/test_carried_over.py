"""State between updates: it holds released and public values only, whoever the users were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policy_helpers import learner, trajectories

from dptune.policy.environments.environment import Environment, Interface, Trajectories
from dptune.policy.environments.learner import PolicyLearner, PolicyState
from dptune.policy.environments.training import step, streams_of
from dptune.policy.method import Dppg
from dptune.policy.run_files import UserRegister
from dptune.policy.schedules import PolicyTraining


class Scripted:
    """A stream that gives the same trajectories at every update, and records the policies it was asked for."""

    def __init__(self, seed: int) -> None:
        self.met, self.policies = trajectories(4, 6, seed), list[torch.Tensor]()

    def meet(self, number: int, policy: Any, parameters: torch.Tensor) -> Trajectories:
        self.policies.append(parameters)
        return self.met


def after_a_step(it: PolicyLearner, users: int, public: int = 77) -> tuple[PolicyState, list[Any], Scripted]:
    """The state after an update whose release is replaced by a constant, its clip radii, and the public stream."""
    radii: list[Any] = []

    def pinned(blocks: Any, given: Any) -> list[torch.Tensor]:
        radii.append(tuple(given))
        return [torch.full_like(block[0], 0.01, dtype=torch.float32) for block in blocks]

    streams = {"users": Scripted(users), "public": Scripted(public)}
    after = step(it, it.start(), 0, streams, UserRegister(), pinned)  # type: ignore[arg-type]
    return after, radii, streams["public"]


def tensors(state: PolicyState) -> dict[str, torch.Tensor]:
    return {"policy": state.policy, "critic": state.critic} | {f"last.{key}": it for key, it in state.last.items()}


@pytest.mark.parametrize("critic", ["private", "none", "public"])
@pytest.mark.parametrize("algorithm", ["ppo", "l2", "kl"])
def test_other_users_with_the_same_release_leave_the_same_state_and_radius(critic: str, algorithm: str) -> None:
    """The state is equal bit for bit. A critic, moments or a radius that depended on trajectories would differ."""
    it = learner(critic, algorithm=algorithm, noise_multiplier=1.0, warm_moments=True)
    one, radii, public = after_a_step(it, users=1)
    other, others_radii, _ = after_a_step(it, users=2)
    assert tensors(one).keys() == tensors(other).keys()
    for name, tensor in tensors(one).items():
        assert torch.equal(tensor, tensors(other)[name]), name
    assert radii == others_radii
    # Other public users do change the critic or the radius, which shows that the comparison above can fail.
    changed, other_radii, _ = after_a_step(it, users=1, public=78)
    assert torch.equal(one.critic, changed.critic) == (critic != "public")
    assert (radii == other_radii) == (algorithm != "kl")
    assert all(bool((policy == it.start().policy).all() | (policy == one.policy).all()) for policy in public.policies)


def test_a_raw_critic_is_what_this_would_find() -> None:
    it = learner("raw", noise_multiplier=1.0)
    one, other = (after_a_step(it, users)[0] for users in (1, 2))
    assert not torch.equal(one.critic, other.critic)


@pytest.mark.parametrize("algorithm", ["ppo", "kl"])
def test_simulated_users_are_nobody(algorithm: str) -> None:
    """Episodes of simulated users have random numbers of their own, so that none repeats a user's episode."""
    environment = Environment("CartPole-v1")
    schedule = PolicyTraining(users=3, steps=4, algorithm=algorithm, fisher_episodes=3, hidden=4, critic_hidden=4)
    it = PolicyLearner(Interface.of(environment), Dppg(noise_multiplier=1.0, critic="public"), schedule)
    streams = streams_of(environment, schedule)
    starts = [
        tuple(row)
        for stream in streams.values()
        for number in range(3)
        for row in stream.meet(number, it.policy, it.start().policy).features[:, 0].tolist()
    ]
    for stream in streams.values():
        stream.close()
    assert len(set(starts)) == len(starts) == 2 * 3 * 3
