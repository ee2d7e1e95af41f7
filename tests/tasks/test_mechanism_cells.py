"""Cells of mechanisms that move their knobs: what they record, what they leave for others to start from."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_pipeline import BUDGET, STEPS, cells

from dptune.core.errors import ConfigError
from dptune.mechanisms.registry import MECHANISMS
from dptune.privacy.accounting.published_accountants import plrvo_epsilon
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.spent_budgets.register import Register
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.paths import RUNS, SPENT
from tasks.settings.params import load_settings
from tasks.split_records import records_digest

QUICK = {"interval": 1, "warmup": 1, "rounds": 1, "batch_size": 1}
#: What a mechanism needs to run for four steps of a model with one pair.
OPTIONS: dict[str, dict[str, Any]] = {
    "rldp": QUICK,
    "rldp_published": QUICK | {"accounting": "published"},
    "autoclip_published": {"accounting": "noise_only"},
    "geoclip": {"rank": 4},
    "dp_lora_fed": {"clients": 9, "clients_per_round": 3.0, "local_steps": 1},
    "dc_sgd_p": {"histogram_noise": 60.0},
    "dc_sgd_e": {"histogram_noise": 60.0},
}


def cell_of(mechanism: str, entry: dict[str, Any], **experiment: Any) -> Cell:
    changes = {"mechanisms": {mechanism: entry}, "experiment": {"mechanisms": [mechanism], **experiment}}
    (cell,) = cells(changes)
    return cell


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "nonprivate"])
def test_every_mechanism_is_one_entry_and_keeps_the_budget_that_it_names(pipeline: Path, mechanism: str) -> None:
    cell = cell_of(mechanism, OPTIONS.get(mechanism, {}))
    result = run_cell(cell, "cpu")
    leaks = mechanism in ("rldp_published", "autoclip_published")
    assert float(result[f"epsilon_{cell.accounting}"]) <= cell.epsilon
    assert result["planned_releases"] == (2 if mechanism == "dp_lora_fed" else STEPS)
    assert result["releases"] == result["planned_releases"] or mechanism == "rldp_published"
    assert result["unit"] == ("client" if mechanism == "dp_lora_fed" else "record")
    assert bool(result["leaks"]) == (result["epsilon_certified"] == "inf") == leaks
    contents = read_ledger(cell.directory / "ledger.jsonl")
    assert contents.complete
    assert contents.header.mechanism == mechanism
    assert result["knobs"][0]["releases"] == 1
    assert len(result["pairs"]) == 1


def test_moving_noise_gets_a_filter_in_the_header_and_stays_within_it(pipeline: Path) -> None:
    cell = cell_of("rldp", QUICK | {"move_noise": True})
    result = run_cell(cell, "cpu")
    header = read_ledger(cell.directory / "ledger.jsonl").header
    assert header.renyi_filter is not None
    assert result["leaks"] == []
    assert result["releases"] == STEPS
    assert float(result["epsilon_certified"]) == pytest.approx(cell.epsilon, rel=1e-6)
    assert len({row["noise_multiplier"] for row in result["knobs"]}) > 1


def test_a_cell_whose_noise_moved_counts_as_its_whole_budget_in_the_register(pipeline: Path) -> None:
    """Its filter is the bound; what the noise used of it is none."""
    result = run_cell(cell_of("rldp", QUICK | {"move_noise": True}), "cpu")
    (total,) = Register(SPENT).totals()
    assert total.entries == 1
    assert total.epsilon == pytest.approx(float(result["epsilon_certified"])) == pytest.approx(BUDGET, rel=1e-6)
    (known,) = Register(SPENT).earlier(records_digest())
    assert known.epsilon == total.epsilon


def test_plrvo_claims_its_budget_at_the_number_of_parameters_that_train(pipeline: Path) -> None:
    """Its accountant sums over coordinates: at another number, the noise would be another."""
    cell = cell_of("plrvo", {"accounting": "published"})
    result = run_cell(cell, "cpu")
    (release,) = read_ledger(cell.directory / "ledger.jsonl").composition
    weights = load_file(cell.directory / "adapter" / "adapter_model.safetensors")
    parameters = sum(weight.numel() for weight in weights.values())
    assert dict(release.claims) == {"dimension": float(parameters)}
    claim = plrvo_epsilon(Counter({release: STEPS}), cell.delta)
    assert float(result["epsilon_published"]) == claim
    assert 0.999 * BUDGET < claim <= BUDGET
    twice = replace(release, claims=(("dimension", 2.0 * parameters),))
    assert plrvo_epsilon(Counter({twice: STEPS}), cell.delta) > 1.001 * BUDGET


def test_a_hyper_policy_is_saved_and_starts_another_run(pipeline: Path) -> None:
    first = cell_of("rldp", QUICK)
    run_cell(first, "cpu")
    folder = first.directory / "controller"
    described = json.loads((folder / "policy.json").read_text())
    assert described["run_id"] == read_ledger(first.directory / "ledger.jsonl").header.run_id
    heir = QUICK | {"init_from": str(folder)}
    with pytest.raises(ConfigError, match="the run of that hyper-policy spent"):
        run_cell(cell_of("rldp", heir, seeds=[1]), "cpu")
    second = cell_of("rldp", heir, seeds=[1], epsilons=[2 * BUDGET])
    result = run_cell(second, "cpu")
    assert result["leaks"] == []
    assert "includes what the run of its hyper-policy spent" in result["guarantee"]
    assert float(result["epsilon_certified"]) <= second.epsilon, "of both runs together"
    contents = read_ledger(second.directory / "ledger.jsonl")
    assert sum(count for _, count in contents.header.inherited) == STEPS
    assert contents.epsilons.certified > contents.header.price(contents.composition - contents.composition).certified
    assert "policy" in second.inputs


def test_a_hyper_policy_of_another_unit_is_refused(pipeline: Path) -> None:
    """What is private about one record says little about a patient who has many."""
    first = cell_of("rldp", QUICK)
    run_cell(first, "cpu")
    heir = QUICK | {"init_from": str(first.directory / "controller")}
    changes = {"mechanisms": {"rldp": heir}, "data": {"unit": "patient"}}
    (second,) = cells(changes, {"experiment": {"mechanisms": ["rldp"], "epsilons": [2 * BUDGET]}})
    with pytest.raises(ConfigError, match="private about one record"):
        run_cell(second, "cpu")


def test_a_hyper_policy_that_read_raw_data_passes_its_leak_on(pipeline: Path) -> None:
    first = cell_of("rldp_published", OPTIONS["rldp_published"])
    run_cell(first, "cpu")
    entry = {"like": "rldp_published", "accounting": "published", **QUICK}
    second = cell_of("heir", entry | {"init_from": str(first.directory / "controller")})
    assert any("raw" in leak for leak in run_cell(second, "cpu")["leaks"])


def test_a_hyper_policy_that_is_not_there_is_an_error_that_names_it(pipeline: Path) -> None:
    with pytest.raises(ConfigError, match="init_from"):
        cell_of("rldp", QUICK | {"init_from": "data/runs/absent/controller"})
    assert not list(RUNS.glob("*rldp*"))


def test_an_entrys_accounting_wins_over_the_experiments(pipeline: Path) -> None:
    cell = cell_of("static", {"accounting": "published"})
    assert cell.accounting == "published"
    assert "accounting" not in cell.options


def test_a_sweep_is_one_entry_for_every_combination(pipeline: Path) -> None:
    sweep = {"interval": [1, 2], "rounds": [1, 2, 4]}
    grid = cells({"mechanisms": {"rldp": {"sweep": sweep}}, "experiment": {"mechanisms": ["static", "rldp"]}})
    swept = {cell.mechanism: cell.options for cell in grid if cell.mechanism != "static"}
    assert len(swept) == 6
    assert swept["rldp_interval2_rounds4"]["interval"] == 2
    assert swept["rldp_interval2_rounds4"]["like"] == "rldp"


def test_the_published_sweep_is_the_papers_grid_and_every_agent_of_it_learns(empty: Path) -> None:
    """8 intervals x 4 batches x 3 rounds, for each of the two. One epoch of 4,559 units would be 72 steps: too few."""
    import yaml
    from tiny_pipeline import ROOT

    from dptune.mechanisms.registry import build

    over = yaml.safe_load((ROOT / "profiles" / "rldp-sweep.yaml").read_text())
    settings = load_settings(ROOT / "params.yaml", over)
    chosen = settings.experiment.mechanisms
    steps = over["training"]["epochs"] * math.ceil(4559 / settings.training.expected_batch_size)
    assert steps == 1008
    idle = []
    for name in chosen:
        entry = settings.mechanisms[name]
        options = {key: entry[key] for key in ("interval", "batch_size", "rounds") if key in entry}
        if name.startswith("rldp"):
            like = str(entry["like"])
            controller = build(like, options | {"noise_multiplier": 1.0, "pairs": 4}).controller
            assert controller.planned_updates(steps) >= 8 * entry["rounds"], name
            idle += [name] * (controller.planned_updates(72) == 0)
    assert len(idle) > 96, "the longer intervals of both"
    assert sum(name.startswith("rldp_interval") for name in chosen) == 96
    assert sum(name.startswith("rldp_published_interval") for name in chosen) == 96
