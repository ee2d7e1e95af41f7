"""The linear agent: what it reads, what it does, what starting from it costs, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mechanism_steps import RATE, SIZES, batch_of, observed, plain, privatised, started
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.linear_agent import FEATURES, PARAMETERS, LinearAgent, initial_parameters, pair_features
from dptune.mechanisms.agents.policy_file import SavedPolicy, fits_unit
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Schedule, calibrated, check_candidate, planned, price
from dptune.mechanisms.registry import build
from dptune.policy.method import Dppg
from dptune.policy.tenants.training import POLICY
from dptune.privacy.accountants import epsilons, pld_epsilon
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader

torch.set_num_threads(1)

QUICK = {"interval": 2, "warmup": 3, "agent": "linear"}
DELTA = 1e-5
SCHEDULE = Schedule(1.0, 20, DELTA)  # everybody in every batch: priced exactly, at once
ANY = st.floats(-1e9, 1e9) | st.sampled_from([math.nan, math.inf, -math.inf, 1e300])


def trained(seed: int = 0) -> torch.Tensor:
    return initial_parameters() + 0.3 * torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(seed))


def saved(folder: Path, *, noise: float = 4.0, updates: int = 3, **changes: Any) -> str:
    """A hyper-policy over tenants."""
    values = {
        "label": "meta",
        "run_id": "1",
        "unit": "tenant",
        "tensors": {"policy.parameters": trained()},
        "features": len(FEATURES),
        "features_seen": 0,
        "releases": Dppg(noise_multiplier=noise, critic="none").planned(updates),
        "leaks": (),
        "options": {"agent": "linear"},
    }
    SavedPolicy(**(values | changes)).write(folder)
    return str(folder)


def heir(folder: str, noise: float = 2.0) -> Mechanism:
    return build("rldp", {"noise_multiplier": noise, "pairs": 2, "agent": "linear", "init_from": folder})


def steps(mechanism: Mechanism, first: int, last: int, sizes: tuple[int, ...] = SIZES) -> list[list[Any]]:
    """Make and observe releases ``first`` to ``last``; the knobs after each."""
    seen = []
    for number in range(first, last + 1):
        generator = torch.Generator().manual_seed(number)
        batch = batch_of(torch.randn(5, sum(sizes), generator=generator), sizes=sizes)
        released = privatised(mechanism, [batch], number, sizes)
        mechanism.controller.observe(observed(released, number, public_loss=3.0, spent=number / 100))
        seen.append(plain(mechanism.knobs()))
    return seen


# What it reads and does


@given(values=st.lists(ANY, min_size=2 * 7 + 4, max_size=2 * 7 + 4))
def test_features_are_eight_a_pair_and_bounded_whatever_is_seen(values: list[float]) -> None:
    features = pair_features(torch.tensor(values, dtype=torch.float64))
    assert features.shape == (2, len(FEATURES))
    assert bool((features.abs() <= 3).all())
    assert bool((features[:, 0] == 1).all())


@given(values=st.lists(st.floats(-5, 5), min_size=3 * 7 + 4, max_size=3 * 7 + 4), order=st.permutations(range(3)))
def test_pairs_are_alike(values: list[float], order: list[int]) -> None:
    """Pairs in another order give their features in that order: no weight knows a pair."""
    flat = torch.tensor(values, dtype=torch.float64)
    moved = torch.cat([flat[:21].view(7, 3)[:, order].flatten(), flat[21:]])
    torch.testing.assert_close(pair_features(moved), pair_features(flat)[order])


def test_its_law_is_that_of_the_policy_that_is_trained() -> None:
    agent, state = LinearAgent(0), torch.randn(4, len(FEATURES), generator=torch.Generator().manual_seed(1))
    agent.load_policy({"parameters": trained()})
    actions = torch.stack([agent.act(state) for _ in range(4000)]).view(4000, 2, 4).transpose(1, 2)
    means, deviations = POLICY.function(trained(), state), trained()[-2:].exp()
    assert POLICY.size == PARAMETERS == 18
    # A mean of 4000 is off by 5 standard errors once in 2e6, a deviation of 4 x 4000 by 5 % once in 1e9.
    assert bool(((actions.mean(dim=0) - means).abs() < 5 * deviations / math.sqrt(4000)).all())
    torch.testing.assert_close((actions - means).flatten(0, 1).std(dim=0), deviations, rtol=0.05, atol=0)


def test_log_radii_come_first_and_then_log_weights() -> None:
    """A policy that only ever says (-1, feature 'radius' of the pair)."""
    mechanism = started("rldp", **QUICK)
    steps(mechanism, 1, 3)
    agent = mechanism.controller._agent
    parameters = torch.zeros(PARAMETERS)
    parameters[0], parameters[-2:] = -1.0, -5.0
    agent.load_policy({"parameters": parameters})
    knobs = steps(mechanism, 4, 5)[-1]
    assert [math.log(radius / 0.1) for radius in knobs[0]] == pytest.approx([-1.0] * 3, abs=0.05)
    assert knobs[2] == pytest.approx([3**-0.5] * 3, abs=0.02)


def test_it_does_not_learn_inside_a_run() -> None:
    mechanism = started("rldp", **QUICK)
    history = steps(mechanism, 1, 12)
    assert torch.equal(mechanism.controller._agent.parameters, initial_parameters())
    assert len({str(knobs) for knobs in history}) > 3, "it acts all the same"


def test_a_policy_starts_runs_of_any_number_of_pairs_and_acts_there_the_same(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for sizes in ((5,), SIZES, (2, 2, 2, 2, 2)):
        warm, set_by_hand = (started("rldp", sizes, **QUICK, **more) for more in ({"init_from": folder}, {}))
        set_by_hand.controller._agent = LinearAgent(0)
        set_by_hand.controller._agent.load_policy({"parameters": trained()})
        assert steps(warm, 1, 6, sizes) == steps(set_by_hand, 1, 6, sizes)


@pytest.mark.parametrize("before", [2, 4, 9])
def test_an_interrupted_run_goes_on_with_identical_knobs(tmp_path: Path, before: int) -> None:
    one, other = (started("rldp", **QUICK, init_from=saved(tmp_path)) for _ in range(2))
    steps(one, 1, before)
    other.knobs()
    other.controller.load_state_dict(copy.deepcopy(one.controller.state_dict()))
    assert plain(one.knobs()) == plain(other.knobs())
    assert steps(one, before + 1, before + 6) == steps(other, before + 1, before + 6)


# What it costs


@pytest.mark.parametrize(("noise", "tenant", "record"), [(1.0, 4.3772, 9.997), (4.0, 0.926, 1.993)])
def test_a_record_pays_for_a_tenant_that_is_replaced(
    tmp_path: Path, noise: float, tenant: float, record: float
) -> None:
    """z for a tenant that is zeroed, z / 2 for a record, whatever the number of updates."""
    mechanism = heir(saved(tmp_path, noise=noise, updates=5))
    policy = SavedPolicy.read(str(tmp_path))
    assert epsilons(policy.releases, DELTA).certified == pytest.approx(tenant, abs=5e-4)
    assert epsilons(mechanism.controller.inherited, DELTA).certified == pytest.approx(record, abs=5e-4)


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_releases_about_records_count_as_they_are(tmp_path: Path, unit: str) -> None:
    releases = Counter({Release(0.2, 4.0): 20})
    assert heir(saved(tmp_path, unit=unit, releases=releases)).controller.inherited == releases


def test_calibration_and_the_ledgers_header_price_run_and_hyper_policy_as_one(tmp_path: Path) -> None:
    """Both count one of the parallel updates, at half of its noise, and together they meet the budget."""
    folder = saved(tmp_path, noise=4.0, updates=7)
    found = calibrated(lambda noise: heir(folder, noise), 4.0, SCHEDULE, "certified").mechanism
    (mine,) = planned(found, SCHEDULE)
    expected = pld_epsilon(Counter({mine: 20, Release(1.0, 2.0, statistics=("policy update",)): 1}), DELTA)
    assert 3.99 < expected <= 4.0
    assert price(found, SCHEDULE).certified == pytest.approx(expected)
    header = RunHeader(
        "rldp", "gdp_clt", "certified", 4.0, DELTA, "patient", 9, inherited=tuple(found.controller.inherited.items())
    )
    again = RunHeader.from_dict(json.loads(json.dumps(header.to_dict())))
    assert again.price(planned(found, SCHEDULE)).certified == pytest.approx(expected)
    alone = calibrated(lambda noise: build("rldp", {"noise_multiplier": noise, "pairs": 2}), 4.0, SCHEDULE, "certified")
    assert found.noise.noise_multiplier > alone.mechanism.noise.noise_multiplier


def test_an_heirs_heir_pays_no_more_than_the_heir_and_its_own(tmp_path: Path) -> None:
    first = saved(tmp_path / "tenants")
    mechanism = started("rldp", **QUICK, init_from=first)
    steps(mechanism, 1, 4)
    own = Counter({mechanism.release(mechanism.knobs(), RATE): 4})
    policy = mechanism.controller.saved_policy("heir", "2", "record", own, ())
    assert policy is not None
    policy.write(tmp_path / "heir")
    again = started("rldp", **QUICK, init_from=str(tmp_path / "heir"))
    assert again.controller.inherited == own + mechanism.controller.inherited


def test_which_runs_a_tenants_price_is_known_for() -> None:
    assert fits_unit("tenant", "record")
    assert fits_unit("tenant", "patient")
    assert not fits_unit("tenant", "client"), "a client's patients may be in many tenants"
    assert fits_unit("client", "client")
    assert not fits_unit("record", "patient")
    assert not fits_unit("record", "tenant")


def test_a_training_without_noise_makes_its_heirs_leak(tmp_path: Path) -> None:
    mechanism = heir(saved(tmp_path, noise=0.0))
    assert math.isinf(price(mechanism, SCHEDULE).certified)


# Bad input


@pytest.mark.parametrize(
    ("options", "field"),
    [({"design": "AB"}, "design"), ({"move_noise": True}, "move_noise"), ({"agent": "cubic"}, "agent")],
)
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refusal:
        build("rldp", {"noise_multiplier": 1.0, "agent": "linear", **options})
    assert refusal.value.field == field


BAD = {
    "another shape": {"tensors": {"policy.parameters": torch.zeros(17)}},
    "not finite": {"tensors": {"policy.parameters": torch.full((18,), math.nan)}},
    "far too large": {"tensors": {"policy.parameters": torch.full((18,), 1e9)}},
    "other networks": {"tensors": {"policy.head.bias": torch.zeros(18)}},
    "no networks": {"tensors": {}},
    "other features": {"features": 9},
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_holds_no_such_policy_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="init_from") as refusal:
        started("rldp", **QUICK, init_from=saved(tmp_path, **BAD[name]))
    assert "Fix:" in str(refusal.value)


def test_an_heir_is_no_candidate_of_a_search(tmp_path: Path) -> None:
    """All candidates would share the releases that it inherits, which the search's price does not have."""
    check_candidate(build("rldp", {"noise_multiplier": 2.0, "pairs": 2, "agent": "linear"}))
    options = f"init_from={saved(tmp_path)}", "pairs=2", "agent=linear", "noise_multiplier=2"
    given = [part for option in options for part in ("--set", option)]
    command = ["account", "rldp", "--delta", "1e-5", "--sample-rate", "1", "--steps", "1", *given, "--candidates", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "init_from: rldp starts from another run's hyper-policy" in done.stderr


def test_a_policy_of_another_agent_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "linear")
    with pytest.raises(ConfigError, match=r"agent linear, and this run's is sac.*set agent to linear"):
        started("rldp", init_from=folder)
    with pytest.raises(ConfigError, match="init_from"):
        started("rldp_published", init_from=folder)
    sac = started("rldp", interval=2, warmup=3)
    steps(sac, 1, 4)
    policy = sac.controller.saved_policy("sac", "2", "record", Counter({Release(0.2, 4.0): 4}), ())
    assert policy is not None
    policy.write(tmp_path / "sac")
    with pytest.raises(ConfigError, match=r"agent sac, and this run's is linear"):
        started("rldp", **QUICK, init_from=str(tmp_path / "sac"))
