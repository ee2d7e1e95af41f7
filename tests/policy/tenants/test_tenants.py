"""Training over tenants: what one tenant can move, what it costs, and how a new tenant starts from it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import gpt2, records, release_lines

from dptune.core.errors import ConfigError, DivergedError
from dptune.core.settings import Lora
from dptune.mechanisms.agents.linear_agent import FEATURES, PARAMETERS, initial_parameters
from dptune.mechanisms.agents.policy_file import SavedPolicy
from dptune.mechanisms.controllers.rldp import Rldp
from dptune.mechanisms.registry import build
from dptune.policy import user_updates
from dptune.policy.method import Dppg
from dptune.policy.run_files import UserReuseError
from dptune.policy.schedules import MetaTraining
from dptune.policy.tenants import training as tenants_module
from dptune.policy.tenants.runs import (
    Outcome,
    Setting,
    Tenant,
    ablate,
    ablation_entries,
    calibrate_entry,
    fine_tune,
    tenants_of,
)
from dptune.policy.tenants.training import Experience, experience_of, meta_train, meta_updates
from dptune.policy.user_updates import noisy_means
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.run_start import _check_header
from dptune.training.spec import RunSpec, TrainingPlan
from tasks.policy import tenants as tenants_task
from tasks.policy.tenants import Tenants, run_tenants, summary_of

ROWS = 12
METHOD = Dppg(noise_multiplier=1.0, critic="none")
TRAINING = MetaTraining(tenants=3, updates=2)
OPTIONS = {"interval": 2, "warmup": 1, "batch_size": 2}
RADIUS = 0.3


def setting(**changes: Any) -> Setting:
    # A sample rate of 1 makes the price exact and quick to compute.
    plan = TrainingPlan(1.0, 0.0, 5, learning_rate=1e-2, warmup_steps=1, physical_batch_size=8, checkpoint_every=5)
    values = {
        "base": gpt2(),
        "lora": Lora(4, 8, 0.0),
        "public": records(6, seed=9),
        "plan": plan,
        "options": OPTIONS,
        "epsilon": 20.0,
        "delta": 1e-5,
    }
    return Setting(**(values | changes))


def tenant(number: int, count: int = 6) -> Tenant:
    return Tenant(number, records(count, seed=number), records(2, seed=100 + number))


def experience(seed: int, gains: torch.Tensor | None = None) -> Experience:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(ROWS, size, generator=generator) for size in (len(FEATURES), 2)]
    return Experience(*drawn, torch.randn(ROWS, generator=generator) if gains is None else gains)


# Dealing records to tenants


@given(patients=st.lists(st.integers(0, 40), min_size=1, max_size=60), count=st.integers(1, 6))
def test_every_record_is_in_one_tenant_with_all_of_its_patient(patients: list[int], count: int) -> None:
    tokens = records(len(patients), longest=4)
    tokens = replace(tokens, rows=[np.array([patient, row]) for row, patient in enumerate(patients)])
    dealt = tenants_of(tokens, np.array(patients), count)
    homes: dict[int, set[int]] = {}
    rows = [(one.number, *map(int, row)) for one in dealt for row in (*one.train.rows, *one.held_out.rows)]
    for number, patient, _ in rows:
        homes.setdefault(patient, set()).add(number)
    assert sorted(row for _, _, row in rows) == list(range(len(patients)))
    assert all(len(numbers) == 1 for numbers in homes.values())
    # A patient who leaves changes no other tenant.
    kept = np.array(patients) != patients[0]
    fewer = tenants_of(
        replace(tokens, rows=[r for r, k in zip(tokens.rows, kept, strict=True) if k]), np.array(patients)[kept], count
    )
    for before, after in zip(dealt, fewer, strict=True):
        if before.number not in homes[patients[0]]:
            assert str(before.train.rows) == str(after.train.rows)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 12])
def test_a_quarter_of_every_tenants_patients_is_held_out_whichever_tenant_it_is(count: int) -> None:
    """Tenants have 100 patients each; the number held out is within 5 standard deviations (4.3 each) of 25."""
    patients = np.arange(100 * count)
    tokens = replace(records(1), rows=[np.array([patient]) for patient in patients])
    for one in tenants_of(tokens, patients, count):
        held, everybody = len(one.held_out.rows), len(one.held_out.rows) + len(one.train.rows)
        assert abs(held - everybody / 4) < 5 * math.sqrt(everybody * 3 / 16), one.number


# Sensitivity to one tenant


@given(
    seeds=st.lists(st.integers(0, 99), min_size=2, max_size=5, unique=True), size=st.sampled_from([1.0, 1e30, math.nan])
)
def test_a_tenant_moves_the_mean_by_radius_over_constant_k_at_most_and_a_null_one_by_nothing(
    seeds: list[int], size: float
) -> None:
    found = [experience(seed) for seed in seeds]
    found[0] = experience(seeds[0], size * found[0].gains)
    rows, without = (meta_updates(initial_parameters(), some, RADIUS) for some in (found, [None, *found[1:]]))
    assert float(rows.norm(dim=1).max()) <= RADIUS * (1 + 1e-6)
    assert not without[0].any(), "exactly"
    torch.testing.assert_close(without[1:], rows[1:], rtol=0, atol=1e-6, msg="nobody else's update changes")
    one, other = (noisy_means([some], [RADIUS], [0.0], len(seeds), OsEntropy())[0] for some in (rows, without))
    assert float((one - other).norm()) <= RADIUS / len(seeds) * (1 + 1e-5)
    torch.testing.assert_close(other, rows[1:].sum(dim=0).float() / len(seeds), rtol=0, atol=1e-6)


def test_tenants_who_are_all_null_move_nothing() -> None:
    assert torch.equal(
        meta_updates(initial_parameters(), [None, None], RADIUS), torch.zeros(2, PARAMETERS, dtype=torch.float64)
    )


def test_an_update_goes_where_actions_gained() -> None:
    """Small radii have advantages and weights have none, so in most tenants the mean log radius falls."""
    found = []
    for seed in range(16):
        drawn = experience(seed)
        drawn.features[:, 0] = 1.0
        actions = 0.5 * drawn.actions
        found.append(Experience(drawn.features, actions, -actions[:, 0]))
    mean = meta_updates(initial_parameters(), found, RADIUS).mean(dim=0)
    assert float(mean[0]) < -0.05
    assert abs(float(mean[1])) < 0.05


# The runs of a tenant


def test_gains_are_over_the_tenants_other_run_and_rows_are_pairs_at_decisions(tmp_path: Path) -> None:
    shared = setting()
    ready = calibrate_entry(shared, "rldp", {**OPTIONS, "agent": "linear"})
    found = experience_of(ready, tenant(1), TRAINING)
    assert found is not None
    runs, decisions, pairs = 2, 2, 2  # after releases 1 and 3; a decision after the last release moves nothing
    assert found.features.shape == (runs * decisions * pairs, len(FEATURES))
    gains = found.gains.view(runs, decisions, pairs)
    torch.testing.assert_close(gains.sum(dim=0), torch.zeros(decisions, pairs), rtol=0, atol=1e-5)
    assert torch.equal(gains[..., 0], gains[..., 1])
    assert bool((gains != 0).any())
    again = experience_of(ready, tenant(1), TRAINING)
    assert again is not None
    assert torch.equal(found.actions, again.actions), "a tenant is a fixed response"


def test_a_tenant_without_records_or_with_a_run_that_fails_contributes_nothing() -> None:
    ready = calibrate_entry(setting(), "rldp", {**OPTIONS, "agent": "linear"})
    assert experience_of(ready, tenant(1, count=0), TRAINING) is None
    broken = replace(tenant(1), train=replace(records(6), rows=[np.array([10**6, 1, 2])] * 6))
    with pytest.raises(IndexError):
        experience_of(ready, broken, TRAINING)
    assert tenants_module.experience_or_none(ready, broken, TRAINING) is None


# Training


def test_training_over_tenants_costs_one_update_and_new_tenants_start_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A null tenant and a failing one take part; the charge is on disk before the noise is drawn."""
    charged: list[int] = []
    means = noisy_means

    def watched(*arguments: Any) -> Any:
        charged.append(release_lines(tmp_path))
        return means(*arguments)

    monkeypatch.setattr(user_updates, "noisy_means", watched)
    group = [tenant(number) for number in range(6)]
    group[1] = tenant(1, count=0)
    group[4] = replace(group[4], train=replace(records(6), rows=[np.array([10**6, 1, 2])] * 6))
    seen: list[int] = []
    shared = setting()
    policy = meta_train(shared, group, METHOD, TRAINING, tmp_path, OsEntropy(), seen.append)
    assert charged == [1, 2]
    assert seen == [1, 2, 3, 4, 5, 6]
    contents = read_ledger(tmp_path / "ledger.jsonl")
    assert contents.complete
    assert contents.header.unit == "tenant"
    assert contents.epsilons.certified == pytest.approx(4.3772, abs=5e-4), "of two updates as of one"
    read = SavedPolicy.read(str(tmp_path / "controller"))
    assert read.releases == contents.composition
    assert read.run_id == contents.header.run_id
    assert not torch.equal(read.tensors["policy.parameters"], initial_parameters())
    assert torch.equal(read.tensors["policy.parameters"], policy.tensors["policy.parameters"])
    with pytest.raises(LedgerError, match="finished"):
        meta_train(shared, group, METHOD, TRAINING, tmp_path, OsEntropy())

    entries = ablation_entries(OPTIONS, tmp_path / "controller")
    assert list(entries) == ["static", "random", "A", "A+B", "untrained", "DPPG-meta"]
    chosen = {label: entries[label] for label in ("static", "A+B", "DPPG-meta")}
    rows = ablate(shared, [tenant(7)], chosen, [0])
    assert [row.label for row in rows] == list(chosen)
    assert all(row.epsilon_certified == pytest.approx(20.0, rel=1e-3) for row in rows)
    assert all(row.epsilon_certified <= 20.0 for row in rows)
    assert rows[2].noise_multiplier > rows[0].noise_multiplier, "it pays for what it inherits"
    assert all(math.isfinite(row.held_out_perplexity) and row.tenant == 7 for row in rows)


def spec_of(units: PrivacyUnits, mechanism: Any, header: RunHeader) -> RunSpec:
    return RunSpec(None, Tokens([], 0, 4), units, mechanism, TrainingPlan(0.5, 2.0, 1), header)


def test_a_client_cannot_inherit_from_tenants(tmp_path: Path) -> None:
    """Patients of a client may be in many tenants."""
    policy = tenants_module._as_policy(initial_parameters(), "meta", "1", METHOD.planned(2))
    policy.write(tmp_path)
    mechanism = build("rldp", {"noise_multiplier": 1.0, "agent": "linear", "init_from": str(tmp_path)})
    inherited = tuple(mechanism.controller.inherited.items())
    for units, refused in (
        (PrivacyUnits.of("patient", np.array([0, 0, 1]), 2), False),
        (PrivacyUnits.clients(2, np.array([0, 1, 2])), True),
    ):
        header = RunHeader("rldp", "gdp_clt", "certified", None, 1e-5, units.kind, len(units), inherited=inherited)
        if refused:
            with pytest.raises(ConfigError, match="private about one tenant, this one about one client"):
                _check_header(spec_of(units, mechanism, header), OsEntropy())
        else:
            _check_header(spec_of(units, mechanism, header), OsEntropy())


def test_a_header_that_leaves_out_what_a_run_started_from_is_refused(tmp_path: Path) -> None:
    """``verify`` relies on the header, and would price the run as if it had inherited nothing."""
    policy = tenants_module._as_policy(initial_parameters(), "meta", "1", METHOD.planned(2))
    policy.write(tmp_path)
    mechanism = build("rldp", {"noise_multiplier": 1.0, "agent": "linear", "init_from": str(tmp_path)})
    whole = tuple(mechanism.controller.inherited.items())
    units = PrivacyUnits.of("record", np.arange(4), 1)
    for inherited in ((), whole[:1], whole):
        header = RunHeader("rldp", "gdp_clt", "certified", None, 1e-5, "record", 4, inherited=inherited)
        if inherited == whole:
            _check_header(spec_of(units, mechanism, header), OsEntropy())
        else:
            with pytest.raises(ConfigError, match="differs from what the mechanism inherits"):
                _check_header(spec_of(units, mechanism, header), OsEntropy())


def test_the_adapters_run_is_priced_with_its_hyper_policy(tmp_path: Path) -> None:
    tenants_module._as_policy(initial_parameters(), "meta", "1", METHOD.planned(2)).write(tmp_path)
    shared = setting()
    entry = {**OPTIONS, "agent": "linear", "init_from": str(tmp_path)}
    mechanism = calibrate_entry(shared, "rldp", entry).mechanism()
    _, prices = fine_tune(shared, tenant(3), mechanism, 20.0, OsEntropy(), 0)
    assert prices.leaks == ()
    assert 19.9 < prices.certified <= 20.0


def test_a_tenant_who_comes_twice_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    """The second attempt is refused too: a restart checks the tenants of earlier updates again."""
    group = [tenant(number % 5) for number in range(6)]
    for _ in range(2):
        with pytest.raises(UserReuseError, match="user 0"):
            meta_train(setting(), group, METHOD, TRAINING, tmp_path, OsEntropy())
        assert not (tmp_path / "ledger.jsonl").exists()


def test_a_training_that_was_cut_off_goes_on_with_tenants_it_has_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []

    def note(ready: Any, one: Tenant, training: MetaTraining) -> Experience:
        met.append(one.number)
        return experience(one.number)

    def die(done: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(tenants_module, "experience_or_none", note)
    group, shared = [tenant(number) for number in range(6)], setting()
    with pytest.raises(KeyboardInterrupt):
        meta_train(shared, group, METHOD, TRAINING, tmp_path, FixedSeed(1), die)
    assert release_lines(tmp_path) == 1
    met.clear()
    for other in (replace(TRAINING, tenants=2, updates=3), replace(TRAINING, seed=1)):
        with pytest.raises(LedgerError, match=r"other settings \(schedule\)"):
            meta_train(shared, group, METHOD, other, tmp_path, FixedSeed(1))
    with pytest.raises(LedgerError, match=r"other settings \(leaks\)"):
        meta_train(shared, group, METHOD, TRAINING, tmp_path, OsEntropy())
    assert met == []
    policy = meta_train(shared, group, METHOD, TRAINING, tmp_path, FixedSeed(1))
    assert met == [3, 4, 5]
    assert release_lines(tmp_path) == 2
    assert policy.leaks == ("fixed seed for noise and sampling: not private",)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": Dppg(noise_multiplier=1.0)}, "critic"),
        ({"method": Dppg(noise_multiplier=0.0, critic="none")}, "noise_multiplier"),
        ({"training": replace(TRAINING, updates=3)}, "updates"),
        ({"setting": {"options": OPTIONS | {"interval": 50, "warmup": 50}}}, "interval"),
        ({"setting": {"options": OPTIONS | {"interval": 0}}}, "interval"),
        ({"setting": {"epsilon": 4.0}}, "init_from"),
    ],
)
def test_settings_that_cannot_work_are_errors_before_any_tenant_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(tenants_module, "experience_or_none", lambda *_: pytest.fail("a tenant was met"))
    with pytest.raises(ConfigError) as refusal:
        meta_train(
            setting(**changes.get("setting", {})),
            [tenant(number) for number in range(6)],
            changes.get("method", METHOD),
            changes.get("training", TRAINING),
            tmp_path,
            OsEntropy(),
        )
    assert refusal.value.field == field
    assert release_lines(tmp_path) == 0


@pytest.mark.parametrize("changes", [{"runs": 1}, {"tenants": 0}, {"updates": 0}])
def test_a_schedule_out_of_range_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        MetaTraining(**changes)


# The task


@pytest.mark.parametrize(
    "lora", ["{rank: 2, alpha: 4, dropout: 0.0}", "{rank: 2, alpha: 4, dropout: 0.0, target_modules: [c_attn]}"]
)
def test_what_a_result_depends_on_is_the_same_when_it_is_read_back(
    lora: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = (Path(__file__).parents[3] / "params.yaml").read_text(encoding="utf-8")
    (tmp_path / "params.yaml").write_text(re.sub(r"(?m)^lora: \{.*\}", f"lora: {lora}", params), encoding="utf-8")
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "narratives.parquet"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tenants_task, "PUBLIC_MODEL", tmp_path / "model")
    monkeypatch.setattr(tenants_task, "PUBLIC_NARRATIVES", tmp_path / "narratives.parquet")
    found = tenants_task._inputs()
    assert found["lora"]["rank"] == 2
    assert json.loads(json.dumps(found)) == found


def test_settings_of_the_task_make_a_whole_plan() -> None:
    """Other tests of the task put a plan of their own in its place."""
    plan = tenants_task._plan_of(Tenants())
    assert (plan.sampler, plan.max_batch, plan.steps, plan.sample_rate) == ("poisson", None, 12, 0.25)


def test_the_task_writes_what_it_found_and_does_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Tenants] = []

    def tiny(settings: Tenants, device: str) -> tuple[Setting, list[Tenant]]:
        prepared.append(settings)
        return setting(options=settings.options), [tenant(number) for number in range(4)]

    inputs = {"code": "1"}
    monkeypatch.setattr(tenants_task, "_inputs", lambda: dict(inputs))
    monkeypatch.setattr(tenants_task, "_make_setting", tiny)
    settings = Tenants(tenants=3, updates=1, noise_multiplier=2.0, epsilon=20.0, interval=2, warmup=1)
    first = run_tenants(settings, tmp_path / "tenants")
    assert first == json.loads((tmp_path / "tenants" / "results.json").read_text())
    assert {row["label"] for row in first["rows"]} == {"static", "random", "A", "A+B", "untrained", "DPPG-meta"}
    assert {row["tenant"] for row in first["rows"]} == {3}, "nobody it was trained on"
    assert all(19.9 < row["epsilon_certified"] <= 20.0 for row in first["rows"])
    assert (first["epsilon_tenant"], first["epsilon_record"]) == pytest.approx((1.993, 4.377), abs=1e-3)
    assert run_tenants(settings, tmp_path / "tenants") == first
    assert len(prepared) == 1
    ledger = tmp_path / "tenants" / "ledger.jsonl"
    run_id = read_ledger(ledger).header.run_id
    (tmp_path / "tenants" / "results.json").unlink()
    run_tenants(settings, tmp_path / "tenants")
    assert read_ledger(ledger).header.run_id == run_id, "only the ablation was lost"
    file = tmp_path / "tenants" / "settings.json"
    stored = json.loads(file.read_text())
    stored["settings"]["physical_batch_size"] = 8  # earlier versions named what moves no number
    file.write_text(json.dumps(stored))
    assert tenants_task._is_finished(tmp_path / "tenants", replace(settings, checkpoint_every=7))
    inputs["code"] = "2"
    assert not tenants_task._is_finished(tmp_path / "tenants", settings)
    assert not ledger.exists(), "other code starts again"
    kept = tmp_path / "tenants.set-aside-1" / "ledger.jsonl"
    assert read_ledger(kept).header.run_id == run_id, "what the first run released stays priced"


def test_a_raised_version_of_a_part_that_tenants_train_with_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants_task, "PUBLIC_MODEL", tmp_path)
    monkeypatch.setattr(tenants_task, "sha256", lambda path: path.name)
    monkeypatch.setattr("tasks.settings.params.load_settings", lambda: SimpleNamespace(lora=Lora()))
    assert "parts" not in tenants_task._inputs(), "at version 1 nothing is written"
    monkeypatch.setattr(Rldp, "VERSION", 2)
    assert tenants_task._inputs()["parts"] == {"controller rldp": 2}


def test_the_summary_compares_run_by_run() -> None:
    rows = [
        Outcome(label, number, 0, 8.0, 1.0, 2.0 + number - gain, 3.0, 2.5)
        for label, gain in (("static", 0.0), ("DPPG-meta", 0.25))
        for number in range(3)
    ]
    best, other = summary_of(rows)
    assert (best["label"], best["gain_over_static"], best["gain_standard_error"]) == ("DPPG-meta", 0.25, 0.0)
    assert (other["label"], other["held_out_perplexity"]) == ("static", 3.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("tenants=0", "policy.tenants: tenants: "),
        ("surprise=1", "policy.tenants: surprise: "),
        ("runs=one", "policy.tenants: runs: "),
        ("learning_rate=11", "policy.tenants: learning_rate: "),
        ("runs", "--set runs: "),
    ],
)
def test_a_bad_setting_is_an_error_that_names_it(change: str, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tenants_task.tenants_of([change])
    assert str(refusal.value).startswith(named)


@pytest.mark.parametrize("fault", ["diverged", "no loss"])
def test_a_failure_that_a_tenants_records_decide_stays_private(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the training of all tenants, and tell that this one's records caused it."""
    ready, one = calibrate_entry(setting(), "rldp", {**OPTIONS, "agent": "linear"}), tenant(1)
    if fault == "no loss":
        one = replace(one, held_out=replace(one.held_out, rows=[np.array([~5, ~6], dtype=np.int32)]))
    else:

        def diverged(*_: Any) -> Any:
            raise DivergedError("weights")

        monkeypatch.setattr("dptune.policy.tenants.training.fine_tune", diverged)
    assert tenants_module.experience_or_none(ready, one, TRAINING) is None
