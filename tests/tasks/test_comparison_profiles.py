"""The comparisons: each mechanism at one of its trials, and at the same one in all of them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import ROOT, write_params

from tasks.experiment.cells import grid
from tasks.profile import read_profile
from tasks.settings.params import load_settings
from tasks.settings.strict import combinations

STUDIES = ("comparison", "comparison-published", "comparison-uci", "comparison-uci-published")
#: RLDP at RLDP's own settings, but for its agent.
ABLATIONS = {
    "rldp_fixed": {"like": "rldp", "controller": "constant"},
    "rldp_random": {"like": "rldp", "policy": "random"},
}
#: What the agent is asked for, which a constant controller has no use for.
_AGENT = ("interval", "warmup", "batch_size")
_AT_8 = {(8, seed) for seed in range(3)}


def profile_of(name: str) -> dict[str, Any]:
    return read_profile(ROOT / "profiles" / f"{name}.yaml")


def chosen(name: str) -> dict[str, dict[str, Any]]:
    """The entries of a study that are run, without the accounting, which a leaking mechanism's names."""
    profile = profile_of(name)
    entries = {label: dict(profile["mechanisms"][label]) for label in profile["experiment"]["mechanisms"]}
    assert entries.keys() == profile["mechanisms"].keys(), "no entry is left over"
    return {label: {key: entry[key] for key in entry if key != "accounting"} for label, entry in entries.items()}


def test_each_mechanism_is_at_one_of_its_eight_trials() -> None:
    trials, seen = profile_of("comparison-rates")["mechanisms"], chosen("comparison")
    assert set(trials) == set(seen) - set(ABLATIONS)
    for label, entry in trials.items():
        tried = combinations(entry["sweep"])
        fixed = {key: value for key, value in entry.items() if key not in ("sweep", "accounting")}
        assert len(tried) == 8, label
        assert seen[label] in [fixed | one for one in tried]


def test_ablations_have_the_settings_of_what_they_ablate() -> None:
    seen = chosen("comparison")
    for label, change in ABLATIONS.items():
        kept = {key: value for key, value in seen["rldp"].items() if "controller" not in change or key not in _AGENT}
        assert seen[label] == change | kept


@pytest.mark.parametrize("name", STUDIES[1:])
def test_all_comparisons_have_the_same_settings(name: str) -> None:
    whole = chosen("comparison")
    for label, entry in chosen(name).items():
        assert entry == whole[label]
    assert name != "comparison-published" or chosen(name).keys() == whole.keys() - {"nonprivate"}


def test_the_default_study_has_those_settings_too(empty: Path) -> None:
    """A rate that its entry leaves out is the default one."""
    write_params()
    settings, whole = load_settings(), chosen("comparison")
    for label, entry in settings.mechanisms.items():
        own = {key: value for key, value in entry.items() if key != "accounting"}
        assert {"learning_rate": settings.training.learning_rate} | own == whole[label]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("comparison-rates", 12 * 8),
        ("comparison", 3 + 13 * 2 * 3),
        ("comparison-published", 13 * 2 * 3),
        ("comparison-uci", 3 + 5 * 2 * 3),
        ("comparison-uci-published", 5 * 2 * 3),
    ],
)
def test_a_comparison_has_as_many_cells_as_it_says(name: str, count: int, pipeline: Path) -> None:
    write_params()
    cells = grid(load_settings(overrides=profile_of(name)))
    assert len({cell.directory for cell in cells}) == len(cells) == count
    assert {cell.experiment for cell in cells} == {name}
    budgets = {(cell.epsilon, cell.seed) for cell in cells if cell.epsilon is not None}
    assert budgets == (
        {(2, 0)} if name.endswith("rates") else {(epsilon, seed) for epsilon in (2, 8) for seed in range(3)}
    )
    leaking = {cell.accounting for cell in cells if cell.mechanism.startswith("rldp_published")}
    assert leaking == {"published" if name.endswith("published") else "noise_only"}
    assert {cell.accounting for cell in cells if cell.mechanism == "static"} <= {
        "published" if name.endswith("published") else "certified"
    }


@pytest.mark.parametrize("study", ["correlated-uci", "correlated-uci-epoch"])
def test_contenders_of_the_real_table_are_at_one_of_seven_trials_each(study: str) -> None:
    profile = profile_of(f"{study}-rates")
    assert "path" not in profile["data"]
    assert profile["data"].get("source", "synthetic") == "synthetic"
    entries, tried = profile["mechanisms"], defaultdict(list)
    assert list(entries) == profile["experiment"]["mechanisms"]
    for label, entry in entries.items():
        options = {key: value for key, value in entry.items() if key != "sweep"}
        contender = entry.get("like", label)
        tried[contender] += [options | {"like": contender} | values for values in combinations(entry.get("sweep", {}))]
    seen = chosen(study)
    assert tried.keys() == seen.keys()
    for label, entry in seen.items():
        assert len(tried[label]) == 7, label
        assert {"like": label} | entry in tried[label]
