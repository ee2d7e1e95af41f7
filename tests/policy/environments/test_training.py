"""Whole runs: ledger, noise, users who come twice, death and resumption, and the leak of a raw critic."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import learner, trajectories

from dptune.core.errors import ConfigError
from dptune.policy import user_updates as shared
from dptune.policy.environments import training as module
from dptune.policy.environments.environment import Environment, Interface, Users
from dptune.policy.environments.learner import PolicyLearner, PolicyState
from dptune.policy.environments.training import train
from dptune.policy.method import NAME, Dppg
from dptune.policy.run_files import UserRegister, UserReuseError
from dptune.policy.schedules import PolicyTraining
from dptune.policy.user_updates import noisy_means
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import spending_of
from dptune.privacy.run_header import RunHeader

pytest.importorskip("gymnasium", reason="needs the extra dptune[policy]")
CARTPOLE, RIVERSWIM = "CartPole-v1", "dptune/Riverswim-v0"
QUICK: dict[str, Any] = {"users": 3, "steps": 12, "updates": 4, "hidden": 4, "critic_hidden": 4, "epochs": 1}
QUICK |= {"evaluate_every": 2, "evaluate_episodes": 2}


def header(epsilon: float | None = None, accounting: str = "certified") -> RunHeader:
    return RunHeader(NAME, "dppg", accounting, epsilon, 1e-5, "user", 12)


def run(
    directory: Path, critic: str = "private", noise: float = 1.0, name: str = CARTPOLE, **options: Any
) -> PolicyState:
    method = Dppg(noise_multiplier=noise, critic=critic)  # type: ignore[arg-type]
    schedule = PolicyTraining(**(QUICK | options))
    return train(Environment(name), method, schedule, header(), directory, OsEntropy())[0]


@pytest.mark.parametrize("critic", ["private", "none", "public", "raw"])
def test_a_run_costs_what_its_ledger_says(tmp_path: Path, critic: str) -> None:
    run(tmp_path, critic)
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.complete
    assert contents.releases == 4
    assert sorted(release.part for release in contents.composition) == [0, 1, 2, 3]
    assert contents.epsilons.published == pytest.approx(5.0, rel=1e-3)
    assert contents.epsilons.certified == (math.inf if critic == "raw" else pytest.approx(4.3772, rel=1e-4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (RIVERSWIM, {"algorithm": "l2", "users": 1, "hidden": 0, "critic_hidden": 0}),
        (RIVERSWIM, {"algorithm": "kl", "users": 1, "hidden": 0, "critic_hidden": 0, "fisher_episodes": 2}),
        (RIVERSWIM, {"algorithm": "l2", "users": 2, "hidden": 0, "form": "additive", "critic_hidden": 0}),
        ("dptune/Dosing-v1", {"updates": 1, "evaluate_episodes": 1, "steps": 5}),
        ("Acrobot-v1", {"updates": 1, "evaluate_episodes": 1}),
    ],
)
def test_every_kind_of_run_ends_with_a_finite_policy(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    assert bool(run(tmp_path, name=name, **options).policy.isfinite().all())


def test_mujoco_runs_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("mujoco", reason="needs the extra dptune[mujoco]")
    state = run(tmp_path, "none", name="Hopper-v5", updates=1, steps=20, evaluate_episodes=1)
    assert bool(state.policy.isfinite().all())


def test_the_ledger_is_charged_before_the_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []

    def spy(*arguments: Any) -> Any:
        lines.append(len((tmp_path / "ledger.jsonl").read_text().splitlines()))
        return original(*arguments)

    original = shared.noisy_means
    monkeypatch.setattr(shared, "noisy_means", spy)
    run(tmp_path)
    assert lines == [2, 3, 4, 5]  # the header's line, and one more before every release


def test_a_run_that_died_goes_on_with_new_users_and_loses_no_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_SAVES", 0.0)
    original, numbers = module.step, []

    def dies(learner: Any, state: Any, number: int, *rest: Any) -> Any:
        numbers.append(number)
        after = original(learner, state, number, *rest)
        if len(numbers) == 3:
            raise KeyboardInterrupt  # charged and released, but its state is never saved
        return after

    monkeypatch.setattr(module, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    run(tmp_path)
    assert numbers == [0, 1, 2, 3]
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 4
    points = json.loads((tmp_path / "progress.json").read_text())
    assert [point["update"] for point in points] == [2, 4]


def test_the_header_must_declare_the_entropy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="entropy"):
        train(
            Environment(CARTPOLE), Dppg(noise_multiplier=1.0), PolicyTraining(**QUICK), header(), tmp_path, FixedSeed(7)
        )
    assert not (tmp_path / "ledger.jsonl").exists()


class _Broken:
    """A vector environment in which the observations of user 1 are NaN."""

    def __init__(self, inner: Any, value: float) -> None:
        self._inner, self._value = inner, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _spoilt(self, observations: Any) -> Any:
        observations = observations.copy()
        observations[1] = self._value
        return observations

    def reset(self, **options: Any) -> Any:
        observations, told = self._inner.reset(**options)
        return self._spoilt(observations), told

    def step(self, actions: Any) -> Any:
        observations, *rest = self._inner.step(actions)
        return self._spoilt(observations), *rest


@pytest.mark.one_case("CartPole-v1-nan", "dptune/Dosing-v0-inf")
@pytest.mark.parametrize("value", [math.nan, math.inf, 3.4e38])
@pytest.mark.parametrize("name", [CARTPOLE, "dptune/Dosing-v0"])
def test_a_broken_sensor_costs_its_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: float
) -> None:
    """A run that dies because of one user's observations would tell of that user, without a charge."""
    original = Environment.vector
    monkeypatch.setattr(
        Environment,
        "vector",
        lambda self, count: _Broken(original(self, count), value) if count == 3 else original(self, count),
    )
    state = run(tmp_path, name=name, steps=5, updates=2)
    assert bool(state.policy.isfinite().all())
    assert bool(state.critic.isfinite().all())
    assert read_ledger(tmp_path / "ledger.jsonl").complete


def test_a_state_without_its_ledger_is_no_start(tmp_path: Path) -> None:
    """A new ledger would not count the releases that led to the state, and its users would take part again."""
    run(tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(LedgerError, match="no ledger beside it"):
        run(tmp_path)


def test_a_finished_run_of_another_schedule_is_not_read(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(LedgerError, match=r"other settings \(schedule\)"):
        run(tmp_path, noise=50.0)


def test_a_finished_run_is_read(tmp_path: Path) -> None:
    assert torch.equal(run(tmp_path).policy, run(tmp_path).policy)


def test_a_run_that_died_after_its_last_charge_has_a_last_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, real = [], module._save

    def save_once(*arguments: Any) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(real(*arguments))

    with monkeypatch.context() as patched:
        patched.setattr(module, "_save", save_once)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    state = run(tmp_path)  # all updates are charged and no state was saved: the run ends with the initial state
    assert torch.equal(state.policy, learner_of(CARTPOLE).start().policy)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 4
    assert [point.update for point in module._load(tmp_path)[1]] == [4]


def test_a_disk_that_takes_no_state_costs_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is written before the first charge of a run, and of each attempt to resume it."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr("dptune.policy.run_files.save_file", full)
            with pytest.raises(OSError, match=r"No space left on device: .*state\.safetensors"):
                run(tmp_path)
        assert read_ledger(tmp_path / "ledger.jsonl").releases == 0
        assert not list(tmp_path.glob("*.partial"))
        assert spending_of(tmp_path) is None
    with monkeypatch.context() as patched:
        patched.setattr(module, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert (tmp_path / "state.safetensors").exists()
    assert spending_of(tmp_path) is None, "the state from before the first charge shows no release"
    run(tmp_path)
    assert spending_of(tmp_path).releases == 4  # type: ignore[union-attr]
    assert read_ledger(tmp_path / "ledger.jsonl").complete


def learner_of(name: str) -> PolicyLearner:
    return PolicyLearner(Interface.of(Environment(name)), Dppg(noise_multiplier=1.0), PolicyTraining(**QUICK))


@pytest.mark.parametrize("changed", [{"users": 2}, {"steps": 13}])
def test_a_run_is_not_resumed_with_another_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """A resumed run with another number of users in each update would use some of them twice."""
    with monkeypatch.context() as patched:
        patched.setattr(module, "evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    with pytest.raises(LedgerError, match=r"other settings \(schedule\)"):
        run(tmp_path, **changed)
    run(tmp_path)


def test_episodes_that_span_updates_are_refused_by_the_assertion(tmp_path: Path) -> None:
    """An episode in two updates is a user in two updates (spec, 5.3). No episode of CartPole ends within two steps."""
    with pytest.raises(UserReuseError, match="user 0 is in a second update"):
        run(tmp_path, continuing=True, steps=2)
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1


def test_what_a_run_saves_is_the_released_state(tmp_path: Path) -> None:
    state = run(tmp_path)
    loaded, points = module._load(tmp_path)
    assert torch.equal(loaded.policy, state.policy)
    assert torch.equal(loaded.critic, state.critic)
    assert set(loaded.last) == {"policy", "critic"}
    assert [point.users for point in points] == [6, 12]


def test_a_user_who_comes_twice_is_refused() -> None:
    """Property t3 of the spec (section 5)."""
    met = UserRegister()
    met.admit((1, 2))
    with pytest.raises(UserReuseError):
        met.admit((3, 2))
    with pytest.raises(UserReuseError):
        UserRegister().admit((4, 4))


def test_every_user_starts_in_a_fresh_environment() -> None:
    schedule = PolicyTraining(**QUICK)
    environment = Environment(RIVERSWIM)
    policy = PolicyLearner(Interface.of(environment), Dppg(noise_multiplier=1.0), schedule).policy
    users = Users(environment, 3, 7, seed=0)
    for number in range(3):
        met = users.meet(number, policy, policy.initial(0))
        assert met.features[:, 0].argmax(dim=1).tolist() == [0, 0, 0]
        assert met.users == tuple(range(3 * number, 3 * number + 3))
    users.close()


def test_an_episode_that_ended_with_the_update_makes_room_for_a_new_user() -> None:
    """Episodes of Riverswim last 20 steps, so updates of 20 steps have new users each time, even if ``continuing``."""
    environment = Environment(RIVERSWIM)
    it = PolicyLearner(Interface.of(environment), Dppg(noise_multiplier=1.0), PolicyTraining(**QUICK))
    users = Users(environment, 2, 20, seed=0, continuing=True)
    met = [users.meet(number, it.policy, it.start().policy) for number in range(2)]
    assert [one.users for one in met] == [(0, 1), (2, 3)]
    assert not met[1].step_mask[:, 0].any()


@pytest.mark.parametrize("critic", ["private", "none"])
def test_one_user_moves_the_release_by_at_most_one_over_z_and_the_next_not_at_all(critic: str) -> None:
    """Property t1 of the spec: without noise, and with one user's slot empty or not."""
    it = learner(critic)
    start, met = it.start(), trajectories(4, 6)
    met.rewards[0] *= 1e3
    without = trajectories(4, 6)
    without.step_mask[0] = False
    after = [_moved(it, start, one) for one in (met, without)]
    radius = it.training.radius
    assert float((after[0].policy - after[1].policy).norm()) <= radius / 4 * (1 + 1e-5)
    assert float((after[0].critic - after[1].critic).norm()) <= it.training.critic_radius / 4 * (1 + 1e-5)
    # The next update depends on the user by the released state alone: with the same state it is the same.
    pinned = [_moved(it, after[0], trajectories(4, 6, seed=9)) for _ in after]
    assert torch.equal(pinned[0].policy, pinned[1].policy)


def test_a_raw_critic_carries_a_user_into_the_next_update_beyond_the_release() -> None:
    """Two runs with equal policies and raw critics that differ by a user have different next releases (spec, 5.1)."""
    it = learner("raw", critic_learning_rate=1.0, epochs=8)
    start, met = it.start(), trajectories(4, 6)
    met.rewards[0] *= 1e3
    without = trajectories(4, 6)
    without.step_mask[0] = False
    hidden = [it.fit_critic(start, one, it.updates(start, one, 0)[1]) for one in (met, without)]
    later = trajectories(4, 6, seed=9)
    later.rewards[:] = 0.0
    nexts = [_moved(it, PolicyState(start.policy, critic), later) for critic in hidden]
    assert float((nexts[0].policy - nexts[1].policy).norm()) > it.training.radius / 4


def _moved(it: PolicyLearner, state: PolicyState, met: Any) -> PolicyState:
    blocks, _ = it.updates(state, met, 0)

    def release(updates: Any, radii: Any) -> list[torch.Tensor]:
        return noisy_means(updates, radii, it.method.multipliers, it.training.users, OsEntropy())

    return it.apply_release(state, blocks, it.training.radius, 1.0, release)


def test_increments_have_the_noise_that_is_announced(tmp_path: Path) -> None:
    """Property t2 of the spec: users have no steps, so updates are noise alone; 4,610 numbers, 6 sigma are 6 %."""
    it = learner("none", noise_multiplier=2.0, hidden=64)
    met = trajectories(4, 6)
    met.step_mask[:] = False
    moved = _moved(it, it.start(), met).policy - it.start().policy
    assert float(moved.std()) == pytest.approx(2.0 * 0.05 / 4, rel=0.07)


def test_step_sizes_and_radii_of_riverswim_are_the_papers() -> None:
    schedule = PolicyTraining(algorithm="l2", users=1, hidden=0)
    assert [schedule.step_size_at(user) for user in (0, 50, 100, 150, 200, 999)] == pytest.approx(
        [12, 2.4, 0.48, 0.096, 0.06, 0.06]
    )
    it = PolicyLearner(Interface.of(Environment(RIVERSWIM)), Dppg(noise_multiplier=3.730631, critic="none"), schedule)
    assert it.radius(it.start(), 0, None) == (pytest.approx(0.0166105, rel=1e-4), 12.0)


def test_half_the_trust_is_smaller_by_the_square_root_of_two() -> None:
    environment, found = Environment(RIVERSWIM), []
    for trust in (1.75, 3.5):
        schedule = PolicyTraining(algorithm="kl", users=1, steps=20, hidden=0, fisher_episodes=3, trust=trust)
        it = PolicyLearner(Interface.of(environment), Dppg(noise_multiplier=1.0, critic="none"), schedule)
        found.append(it.radius(it.start(), 0, Users(environment, 3, 20, seed=0))[0])
    assert found[1] == pytest.approx(found[0] * math.sqrt(2))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"users": 1}, "users"), ({"users": 0}, "users"), ({"radius": 0.0}, "radius"), ({"updates": 0}, "updates"),
     ({"learning_rate": math.inf}, "learning_rate"), ({"radius": 1e-320}, "radius")],
)  # fmt: skip
def test_impossible_schedules_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicyTraining(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("Nowhere-v0", {}, "unknown 'Nowhere-v0'"),
        (RIVERSWIM, {"stay": 2.0}, "stay"),
        (RIVERSWIM, {"depth": 3}, "environment.options"),
        ("HalfCheetah-v3", {}, "environment"),
    ],
)
def test_unknown_environments_and_options_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Environment(name, options)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package, name, extra in (
        ("gymnasium", CARTPOLE, "dptune\\[policy\\]"),
        ("mujoco", "Hopper-v5", "dptune\\[mujoco\\]"),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            for loaded in [key for key in sys.modules if key.startswith("gymnasium.envs.mujoco")]:
                patched.delitem(sys.modules, loaded)
            with pytest.raises(ConfigError, match=extra):
                Environment(name)


def test_a_budget_that_the_noise_passes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        train(
            Environment(CARTPOLE),
            Dppg(noise_multiplier=0.0),
            PolicyTraining(**QUICK),
            header(3.0),
            tmp_path,
            OsEntropy(),
        )
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("name", [CARTPOLE, RIVERSWIM])
def test_what_one_user_does_moves_no_other_users_world(name: str) -> None:
    """User 0 takes the opposite actions and all others the same: the others' observations and rewards stay the same."""
    seen = []
    for first in (0, 1):
        vector = Environment(name).vector(3)
        vector.reset(seed=4)
        rows = [vector.step(np.array([(step + first) % 2, step % 3 == 0, 1])) for step in range(120)]
        vector.close()
        seen.append([(row[0][1:].tolist(), row[1][1:].tolist()) for row in rows])
    assert seen[0] == seen[1]
