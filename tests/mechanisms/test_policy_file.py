"""A saved hyper-policy: whoever starts from it pays for it, and what was priced is what is loaded."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.policy_file import SavedPolicy
from dptune.mechanisms.agents.sac import SacOptions, SoftActorCritic
from dptune.mechanisms.planning import Schedule, calibrated, price
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import pld_epsilon
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader

torch.set_num_threads(1)

STEP = Release(0.01, 2.0)
SCHEDULE = Schedule(0.01, 100, 1e-5)


def saved(folder: Path, leaks: tuple[str, ...] = (), releases: Counter[Release] | None = None) -> SavedPolicy:
    tensors = {"policy.weight": torch.ones(2), "features.mean": torch.zeros(3), "features.squares": torch.ones(3)}
    policy = SavedPolicy(
        "parent", "id", "record", tensors, 3, 9, releases or Counter({STEP: 50}), leaks, {"interval": 4}
    )
    policy.write(folder)
    return policy


def heir(folder: Path, **options: Any) -> Any:
    return build("rldp", {"noise_multiplier": 2.0, "pairs": 2, "init_from": str(folder), **options})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    policy = saved(tmp_path, ("a leak",))
    again = SavedPolicy.read(str(tmp_path))
    assert (again.label, again.releases, again.leaks, again.features_seen) == (
        "parent",
        policy.releases,
        ("a leak",),
        9,
    )
    torch.testing.assert_close(again.tensors, policy.tensors)


def test_an_heir_pays_for_both_runs(tmp_path: Path) -> None:
    """Equal steps, so the pair costs what one run of all the steps would."""
    saved(tmp_path, releases=Counter({Release(0.01, 2.0): 50}))
    mechanism = heir(tmp_path)
    alone = price(build("rldp", {"noise_multiplier": 2.0, "pairs": 2}), SCHEDULE).certified
    own = mechanism.release(mechanism.knobs(), 0.01)
    both = pld_epsilon(Counter({own: 100, STEP: 50}), 1e-5)
    assert price(mechanism, SCHEDULE).certified == both > alone
    assert price(mechanism, SCHEDULE).published == price(build("rldp", {"noise_multiplier": 2.0}), SCHEDULE).published


def test_the_ledger_header_alone_prices_both_runs(tmp_path: Path) -> None:
    inherited = ((STEP, 50), (Release(0.01, 3.0), 7))
    header = RunHeader("rldp", "gdp_clt", "certified", None, 1e-5, "record", 10, inherited=inherited)
    again = RunHeader.from_dict(json.loads(json.dumps(header.to_dict())))
    assert again == header
    own = Counter({Release(0.01, 1.0): 5})
    assert again.price(own).certified == pld_epsilon(own + Counter(dict(inherited)), 1e-5)
    tight = replace(again, epsilon=again.price(Counter()).certified + 1e-6)
    assert tight.within_budget(Counter())
    assert not tight.within_budget(own)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3"])
def test_a_header_with_a_bad_count_is_refused(count: Any) -> None:
    header = RunHeader("rldp", "gdp_clt", "certified", None, 1e-5, "record", 10, inherited=((STEP, 50),)).to_dict()
    header["inherited"][0][1] = count
    with pytest.raises(ConfigError, match="inherited"):
        RunHeader.from_dict(header)


def test_any_leak_of_the_first_run_is_a_leak_of_the_second(tmp_path: Path) -> None:
    saved(tmp_path, ("fixed seed",))
    mechanism = heir(tmp_path)
    release = mechanism.release(mechanism.knobs(), 0.01)
    assert release.leaks == ("hyper-policy of parent: fixed seed",)
    assert math.isinf(price(mechanism, SCHEDULE).certified)


def test_an_ancestor_that_moved_its_noise_certifies_nothing_for_the_heir(tmp_path: Path) -> None:
    """Its filter covered its own run, not the pair."""
    saved(tmp_path, releases=Counter({Release(0.01, 2.0, adaptive=True): 50}))
    assert math.isinf(price(heir(tmp_path), SCHEDULE).certified)


def test_moving_noise_cannot_inherit(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match="init_from"):
        calibrated(lambda noise: heir(tmp_path, move_noise=True, noise_multiplier=noise), 4.0, SCHEDULE, "certified")


def test_a_budget_that_the_first_run_has_used_up_is_an_error_that_says_so(tmp_path: Path) -> None:
    saved(tmp_path, releases=Counter({Release(0.01, 1.0): 1000}))
    with pytest.raises(ConfigError, match="the run of that hyper-policy spent"):
        calibrated(lambda noise: heir(tmp_path, noise_multiplier=noise), 1.8, SCHEDULE, "certified")


def test_a_policy_that_is_replaced_after_it_was_priced_is_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path)
    mechanism = heir(tmp_path)
    before = mechanism.release(mechanism.knobs(), 0.01)
    saved(tmp_path, ("a leak",))
    assert mechanism.release(mechanism.knobs(), 0.01) == before
    assert mechanism.controller._source.leaks == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "policy.json").unlink(),
        lambda folder: (folder / "policy.safetensors").unlink(),
        lambda folder: (folder / "policy.safetensors").write_bytes(b"xx"),
        lambda folder: (folder / "policy.json").write_text("[]"),
        lambda folder: (folder / "policy.json").write_text('{"format": 99}'),
        lambda folder: edit(folder, releases=[[STEP.to_dict(), 0]]),
        lambda folder: edit(folder, releases=[[{"sample_rate": 0.1}, 1]]),
        lambda folder: edit(folder, leaks="none"),
        lambda folder: edit(folder, sha256="0" * 64),  # tensors of another, perhaps leaking, policy
        lambda folder: edit(folder, surprise=1),
    ],
)
def test_a_damaged_policy_is_refused_when_the_mechanism_is_priced(tmp_path: Path, damage: Any) -> None:
    saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match="init_from"):
        price(heir(tmp_path), SCHEDULE)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_building_the_agent_reseeds_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seed is public; dropout masks on CUDA must come from the secret one that the loop has set."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    before = torch.random.get_rng_state()
    agent = SoftActorCritic(4, 2, SacOptions(batch_size=1), seed=0)
    agent.remember(torch.zeros(4), agent.act(torch.zeros(4)), 1.0, torch.zeros(4))
    agent.improve()
    assert seeded == []
    assert torch.equal(torch.random.get_rng_state(), before)


def test_entries_of_the_same_release_add_up() -> None:
    header = RunHeader("rldp", "gdp_clt", "certified", None, 1e-5, "record", 10, inherited=((STEP, 200), (STEP, 1)))
    assert header.price(Counter()).certified == pld_epsilon(Counter({STEP: 201}), 1e-5)
