"""The grid, and the folder names by which a cell whose inputs did not change is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import BUDGET, cells, static, write_params

from dptune.core import settings as core_settings
from dptune.core.errors import ConfigError
from dptune.core.files import sha256
from dptune.core.settings import UpdateRule
from tasks.corpus.canaries import plant
from tasks.experiment.cells import Cell, of_a_pass
from tasks.experiment.cells import grid as grid_of
from tasks.paths import EVAL, PUBLIC_MODEL, PUBLIC_VALIDATION, RUNS, TRAIN
from tasks.settings.mechanisms import own_epsilons
from tasks.settings.params import load_settings, merge


def names(*changes: dict[str, Any]) -> set[str]:
    return {cell.directory.name for cell in cells(*changes)}


def test_the_grid_is_the_product_and_nonprivate_comes_once_a_seed(pipeline: Path) -> None:
    local = {"source": "data/models/public"}
    change = {"experiment": {"models": {"small": local, "other": local}, "epsilons": [1, 2, 8], "seeds": [0, 1]}}
    grid = cells(change)
    private = {(c.model_name, c.epsilon, c.seed) for c in grid if c.mechanism == "static"}
    free = [(c.model_name, c.epsilon, c.seed) for c in grid if c.mechanism == "nonprivate"]
    assert private == {(model, eps, seed) for model in ("small", "other") for eps in (1, 2, 8) for seed in (0, 1)}
    assert sorted(free) == sorted((model, None, seed) for model in ("small", "other") for seed in (0, 1))
    assert len(grid) == len(private) + len(free)
    assert len({c.directory for c in grid}) == len({c.label for c in grid}) == len(grid)


def test_labels_are_readable_and_folders_lie_under_runs(pipeline: Path) -> None:
    cell = static({"experiment": {"epsilons": [0.5]}})
    assert cell.label == "small.static.eps0.5.seed0"
    assert cell.directory.parent == RUNS
    assert cell.directory.name.startswith(f"{cell.label}-")
    assert Cell.model_validate_json(cell.model_dump_json()).directory == cell.directory


def test_one_more_epsilon_adds_exactly_its_cells(pipeline: Path) -> None:
    before, after = names(), names({"experiment": {"epsilons": [BUDGET, 3]}})
    assert before < after
    assert [name.split("-")[0] for name in after - before] == ["small.static.eps3.seed0"]


def test_one_more_seed_or_mechanism_leaves_the_others(pipeline: Path) -> None:
    mine = {"clipper": "flat", "noise": "gaussian", "controller": "constant", "max_grad_norm": 0.5}
    more = {"mechanisms": {"mine": mine}, "experiment": {"mechanisms": ["nonprivate", "static", "mine"]}}
    assert names() < names(more)
    assert names() < names({"experiment": {"seeds": [0, 1]}})


def test_a_mechanism_with_epsilons_of_its_own_has_cells_at_those(pipeline: Path) -> None:
    own = {"mechanisms": {"static": {"epsilons": [3, 0.5]}}}
    assert {cell.epsilon for cell in cells(own) if cell.mechanism == "static"} == {3, 0.5}
    same = {"mechanisms": {"static": {"epsilons": [BUDGET]}}}
    assert static(same).directory == static().directory, "how a budget was given must not make another run"
    assert cells(own | {"experiment": {"epsilons": []}}), "none of the experiment's is needed"
    settings = load_settings()
    assert own_epsilons(settings.mechanisms, settings.experiment) == {"static": (3.0, 0.5)}
    write_params({"mechanisms": {"static": {"on_model": {"small": {"epsilons": [7]}}}}})
    settings = load_settings()
    assert own_epsilons(settings.mechanisms, settings.experiment) == {"static": (7.0,)}
    write_params()
    assert own_epsilons(load_settings().mechanisms, load_settings().experiment) == {}


def test_a_mechanism_may_run_at_more_epsilons_than_the_experiments(pipeline: Path) -> None:
    """A profile that lists its own mechanisms runs them at its epsilons, and not at those that params.yaml adds."""

    def budgets(given: dict[str, Any]) -> list[float | None]:
        return [cell.epsilon for cell in cells(given) if cell.mechanism == "static"]

    more = {"experiment": {"mechanisms": ["nonprivate", {"static": [0.5, BUDGET, 3]}]}}
    assert names() < names(more)
    assert budgets(more) == [BUDGET, 0.5, 3]
    assert budgets(merge(more, {"experiment": {"epsilons": [7]}})) == [7, 0.5, BUDGET, 3]
    assert budgets(merge(more, {"mechanisms": {"static": {"epsilons": [7]}}})) == [7, 0.5, BUDGET, 3]
    assert budgets(merge(more, {"mechanisms": {"static": {"epsilons": None}}})) == [BUDGET, 0.5, 3]
    assert budgets(merge(more, {"mechanisms": {"static": {"on_model": {"small": {"epsilons": [7]}}}}})) == [
        7,
        0.5,
        BUDGET,
        3,
    ]
    write_params(more)
    assert load_settings().experiment.mechanisms == ("nonprivate", "static")
    replaced = load_settings(overrides={"experiment": {"mechanisms": ["static"]}})
    assert [cell.epsilon for cell in grid_of(replaced)] == [BUDGET]


@pytest.mark.parametrize(
    "table", [{"static": 3}, {}, {"static": [1], "nonprivate": [2]}, {"static": {"epsilons": [1]}}]
)
def test_a_table_among_mechanisms_that_says_something_else_is_refused(pipeline: Path, table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"experiment\.mechanisms: .* write static, or \{static: \[1, 8\]\}"):
        cells({"experiment": {"mechanisms": [table]}})


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"lost": [1]}, "'lost' has no entry"),
        ({"static": ["a"]}, "mechanisms.static: epsilons"),
        ({"static": [-1]}, "mechanisms.static: epsilons"),
        ({"nonprivate": [3]}, "mechanisms.nonprivate: epsilons: no noise"),
    ],
)
def test_more_epsilons_are_checked_as_an_entrys_own(pipeline: Path, table: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        cells({"experiment": {"mechanisms": [table]}})


@pytest.mark.parametrize(
    "twice",
    [{"epsilons": [1, 1]}, {"epsilons": [1, 1.0]}, {"seeds": [0, 0]}, {"mechanisms": ["static", "static"]}],
)
def test_an_entry_given_twice_is_refused(pipeline: Path, twice: dict[str, Any]) -> None:
    """Two processes would charge one ledger."""
    with pytest.raises(ConfigError, match=rf"experiment\.{next(iter(twice))}: .* is given twice.*Fix"):
        cells({"experiment": twice})


@pytest.mark.parametrize(
    "near",
    [
        {"experiment": {"epsilons": [2, 2.0000001]}},
        {"experiment": {"mechanisms": [{"static": [BUDGET + 1e-9]}]}},
        {"mechanisms": {"static": {"epsilons": [3, 3.000001]}}},
    ],
)
def test_epsilons_that_the_names_of_cells_cannot_tell_apart_are_refused(pipeline: Path, near: dict[str, Any]) -> None:
    """Both cells trained and paid, and then no report could be written of results of one label."""
    with pytest.raises(ConfigError, match=r"epsilons: .* in the names of cells, as another epsilon is"):
        cells(near)


CHANGES: dict[str, dict[str, Any]] = {
    "training": {"training": {"epochs": 0.5}},
    "records of a point": {"training": {"evaluate_records": 3}},
    "lora": {"lora": {"rank": 4}},
    "delta": {"experiment": {"delta": 1e-6}},
    "accounting": {"experiment": {"accounting": "published"}},
    "telemetry": {"experiment": {"telemetry": "private"}},
    "unit": {"data": {"unit": "patient"}},
    "options": {"mechanisms": {"static": {"max_grad_norm": 2.0}}},
    "dtype": {"experiment": {"models": {"small": {"dtype": "bfloat16"}}}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_setting_is_another_folder(pipeline: Path, change: dict[str, Any]) -> None:
    before, after = static(), static(change)
    assert before.label == after.label
    assert before.directory != after.directory


UNRELATED: dict[str, dict[str, Any]] = {
    "devices": {"experiment": {"devices": ["cuda:0", "cuda:1"]}},
    "batch on the device": {"training": {"physical_batch_size": 8}},
    "checkpoints": {"training": {"checkpoint_every": 7, "evaluate_every": 9, "gradient_checkpointing": True}},
    "retries": {"experiment": {"retries": 5, "cells_per_device": 4}},
    "other mechanism": {"mechanisms": {"nonprivate": {"pairs": 1}}},
    "synthetic size, data unchanged": {"data": {"synthetic": {"encounters": 300}}},
}


@pytest.mark.parametrize("change", UNRELATED.values(), ids=UNRELATED.keys())
def test_what_decides_no_result_changes_no_folder(pipeline: Path, change: dict[str, Any]) -> None:
    assert static().directory == static(change).directory


def append_byte(path: Path) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda _: path.write_bytes(path.read_bytes() + b"\0") and None


def planted_again() -> None:
    TRAIN.unlink()
    plant()


INPUTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "train": lambda _: planted_again(),
    "eval": append_byte(EVAL),
    "public validation": append_byte(PUBLIC_VALIDATION),
    "weights": append_byte(PUBLIC_MODEL / "model.safetensors"),
    "tokenizer": append_byte(PUBLIC_MODEL / "tokenizer.json"),
    "version": lambda patch: patch.setattr(core_settings, "VERSION", 2),
}


@pytest.mark.parametrize("change", INPUTS.values(), ids=INPUTS.keys())
def test_another_input_is_another_folder(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = names()
    change(monkeypatch)
    assert not before & names()


def test_a_hub_model_is_known_by_its_commit(pipeline: Path) -> None:
    commits = ["a" * 40, "b" * 40]
    folders = set()
    for commit in commits:
        hub = {"source": "some/model", "revision": commit}
        cell = static({"experiment": {"models": {"small": hub}}})
        assert cell.inputs["model"] == f"some/model@{commit}"
        folders.add(cell.directory)
    assert len(folders) == 2


def test_a_cell_holds_no_private_value(pipeline: Path) -> None:
    """Digests that a random salt keeps from testing guesses, digests of public files, and settings."""
    cell = static()
    assert set(cell.inputs) == {"data", "model"}
    assert all(len(value) == 64 for value in cell.inputs.values())
    assert sha256(EVAL) not in cell.model_dump_json(), "that one has no salt"


def test_a_mechanisms_entry_may_name_an_update_rule_of_its_own(pipeline: Path) -> None:
    entries = {"static": {"schedule": "linear", "learning_rate": 0.04}, "quantile": {}}
    static, quantile = cells({"mechanisms": entries, "experiment": {"mechanisms": ["static", "quantile"]}})
    assert (static.training.rule.schedule, static.training.learning_rate) == ("linear", 0.04)
    assert quantile.training.rule == UpdateRule()
    assert "schedule" not in static.options
    assert of_a_pass(static) == of_a_pass(quantile)
    assert static.directory != quantile.directory


@pytest.mark.parametrize(("option", "value"), [("optimizer", "lion"), ("average_share", 2), ("momentum", "much")])
def test_a_wrong_update_rule_in_an_entry_is_named(pipeline: Path, option: str, value: Any) -> None:
    with pytest.raises((ConfigError, ValueError), match=option):
        cells({"mechanisms": {"static": {option: value}}, "experiment": {"mechanisms": ["static"]}})
