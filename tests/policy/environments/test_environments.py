"""dptune's own environments: gymnasium's checker accepts them, closed forms hold, bad options are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dptune.core.errors import ConfigError
from dptune.policy.environments.dosing import HIGHEST, LOWEST, Dosing, reward, slopes
from dptune.policy.environments.riverswim import LEFT, RIGHT, STATES, Pays, rewards, transitions, value
from dptune.policy.environments.swimmers import Riverswim

ALWAYS_RIGHT = np.eye(2)[[RIGHT] * STATES]
ALWAYS_LEFT = np.eye(2)[[LEFT] * STATES]


@pytest.mark.parametrize(
    "environment",
    [Riverswim(), Riverswim(5, 0.9, "staying"), Dosing(), Dosing(random_meals=True, interval=60)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*A Box observation space")
def test_gymnasiums_checker_passes(environment: Any) -> None:
    check_env(environment, skip_render_check=True)


@pytest.mark.parametrize(
    ("stay", "pays", "best", "right"),
    [
        (0.6, "always", 3.39726, 3.39664),
        (0.6, "staying", 2.03862, 2.03798),
        (0.9, "always", 5.19514, 5.19452),
        (0.9, "staying", 4.67569, 4.67507),
    ],
)
def test_riverswims_values_are_the_specs(stay: float, pays: Pays, best: float, right: float) -> None:
    assert value(stay=stay, pays=pays) == pytest.approx(best, abs=5e-6)
    assert value(ALWAYS_RIGHT, stay=stay, pays=pays) == pytest.approx(right, abs=5e-6)
    assert value(ALWAYS_LEFT, stay=stay, pays=pays) == pytest.approx(0.1)


def test_a_random_swimmer_earns_next_to_nothing() -> None:
    assert value(np.full((STATES, 2), 0.5)) == pytest.approx(0.04379, abs=5e-6)


@pytest.mark.one_case
@pytest.mark.parametrize("pays", ["always", "staying"])
def test_riverswim_follows_its_tables(pays: Pays) -> None:
    """Frequencies and mean rewards of 40,000 steps are within 5 standard errors; 30 comparisons, false alarm 2e-5."""
    swim, generator = Riverswim(20, 0.6, pays), np.random.default_rng(0)
    state, _ = swim.reset(seed=1)
    seen, paid = np.zeros((2, STATES, STATES)), np.zeros((2, STATES))
    for _ in range(40_000):
        action = int(generator.random() < 0.85)
        after, gain, _, ended, _ = swim.step(action)
        seen[action, state, after] += 1
        paid[action, state] += gain
        state = swim.reset()[0] if ended else after
    visits = seen.sum(-1, keepdims=True).clip(1)
    moves = transitions(0.6)
    assert (np.abs(seen / visits - moves) <= 5 * np.sqrt(moves * (1 - moves) / visits) + 1e-12).all()
    assert visits.min() > 20
    np.testing.assert_allclose(paid / visits[..., 0], rewards(0.6, pays), atol=5 * 0.5 / np.sqrt(visits.min()))


def test_the_usual_dose_keeps_a_fasting_patient_in_range_and_others_do_not() -> None:
    """Glucose settles at 76 mg/dl under 3 mU/min and the constant intake, and rises far above without insulin."""
    steady = np.array([76.2, 100 / 3, 100 / 3, 3 / 0.18, 3 / 0.18, 250.0])
    assert np.abs(slopes(steady, 3.0, 1000.0)[1:]).max() < 1e-9
    assert abs(slopes(steady, 3.0, 1000.0)[0]) < 0.1
    ended = {}
    for dose in (0.0, 3.0, 10.0):
        day = Dosing()
        day.reset(seed=0)
        for _ in range(35):  # to about six in the morning, before the first meal
            observation, *_ = day.step(np.array([dose], np.float32))
        ended[dose] = float(observation[0])
    assert ended[0.0] > 2 * HIGHEST
    assert LOWEST < ended[3.0] < HIGHEST
    assert ended[10.0] < LOWEST


def test_a_day_has_143_doses_and_seeds_fix_it() -> None:
    def glucose(random_meals: bool, seed: int) -> list[float]:
        day = Dosing(random_meals)
        levels, ended = [float(day.reset(seed=seed)[0][0])], False
        while not ended:
            observation, _, _, ended, _ = day.step(np.array([3.0], np.float32))
            levels.append(float(observation[0]))
        return levels

    assert len(glucose(False, 0)) == 144
    assert glucose(True, 3) == glucose(True, 3) != glucose(True, 4)


def test_the_reward_is_one_at_the_target_and_minus_one_outside() -> None:
    assert reward(80.0) == 1.0
    assert reward(64.9) == reward(105.1) == -1.0
    assert reward(75.0) == reward(85.0)
    assert 0 < reward(90.0) < reward(85.0) < 1


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("horizon", lambda: Riverswim(horizon=0)),
        ("stay", lambda: Riverswim(stay=1.0)),
        ("pays", lambda: Riverswim(pays="never")),  # type: ignore[arg-type]
        ("interval", lambda: Dosing(interval=7)),
        ("interval", lambda: Dosing(interval=1440)),
    ],
)
def test_bad_settings_are_named(field: str, make: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: .* Fix: "):
        make()
