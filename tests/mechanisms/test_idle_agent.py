"""A run so short that its agent learns nothing is named before it starts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dptune.mechanisms.agents.rl import idle_agent
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.registry import build


def agent(name: str = "rldp", **options: Any) -> Mechanism:
    return build(name, {"noise_multiplier": 1.0} | options)


@pytest.mark.parametrize("name", ["rldp", "rldp_published"])
@pytest.mark.parametrize(("warmup", "interval"), [(50, 112), (8, 8), (0, 1), (3, 4), (16, 112)])
def test_the_warning_ends_where_the_first_update_comes(name: str, warmup: int, interval: int) -> None:
    """The number of steps that it asks for is the least that helps, for each of the two rhythms."""
    made = agent(name, warmup=warmup, interval=interval)
    first = next(steps for steps in range(1, 1000) if made.controller.planned_updates(steps))
    assert idle_agent(made, first) is None
    for steps in {1, max(1, first // 2), max(1, first - 1)} - {first}:
        warning = str(idle_agent(made, steps))
        assert warning.startswith(f"the agent of {name} makes no update in {steps} steps (at most 1 action, 0 rounds)")
        assert [int(found) for found in re.findall(r"train for (\d+) steps", warning)] == [first]
        assert f"which comes at step {first} with" in warning
        assert f"warmup {warmup} and interval {interval}" in warning


def test_an_agent_without_rounds_is_named_however_long_it_acts() -> None:
    assert "its rounds are 0" in str(idle_agent(agent(rounds=0), 10_000))


@pytest.mark.parametrize(
    "made",
    [agent(policy="random"), agent(agent="linear"), build("static", {"noise_multiplier": 1.0}), agent("quantile")],
    ids=["random", "linear", "static", "quantile"],
)
def test_who_is_not_to_learn_is_not_warned(made: Mechanism) -> None:
    assert idle_agent(made, 1) is None
