"""PPO and A2C of stable-baselines3, on gymnasium's environments and on dptune's own."""

from __future__ import annotations

import math

import pytest

from dptune.core.errors import ConfigError
from dptune.policy.environments import baselines
from dptune.policy.environments.baselines import train_baseline
from dptune.policy.environments.environment import Environment


@pytest.mark.parametrize(("name", "environment"), [("ppo", "CartPole-v1"), ("a2c", "dptune/Riverswim-v0")])
def test_a_baseline_gives_a_curve(name: str, environment: str) -> None:
    pytest.importorskip("stable_baselines3", reason="needs the extra dptune[policy]")
    points = train_baseline(name, Environment(environment), timesteps=64, every=32, episodes=2, seed=0)  # type: ignore[arg-type]
    assert [point.update for point in points] == [32, 64]
    assert all(math.isfinite(point.mean_return) for point in points)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="dptune\\[policy\\]"):
        train_baseline("ppo", Environment("CartPole-v1"), timesteps=1, every=1, episodes=1, seed=0)
