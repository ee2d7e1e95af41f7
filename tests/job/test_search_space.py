"""The public space of a search, and what its file may say."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import ConfigError
from dptune.job.search.kinds import settings_of
from dptune.job.search.settings import SearchSettings
from dptune.job.search.space import Range, Space
from dptune.job.settings import TuneSettings, as_written_now
from dptune.privacy.entropy import FixedSeed

SPACE = {
    "mechanism": ["static", "quantile"],
    "learning_rate": {"log_uniform": [0.001, 0.02]},
    "expected_batch_size": [32, 64, 128],
}


def test_kinds_are_all_combinations_of_values_with_their_chances() -> None:
    space = Space.of([{"weight": 3, **SPACE}, {"mechanism": "static", "learning_rate": 0.1}])
    kinds = space.kinds()
    assert len(kinds) == 7
    assert math.fsum(weight for weight, _ in kinds) == pytest.approx(1)
    assert [weight for weight, _ in kinds] == pytest.approx([0.125] * 6 + [0.25])
    assert kinds[1][1] == {"expected_batch_size": 32, "learning_rate": 0.001, "mechanism": "quantile"}


def test_each_kind_is_checked_at_both_ends_of_its_own_ranges() -> None:
    """Tables may name the same settings, with other ranges."""
    rates = [{"learning_rate": {"uniform": [low, 2 * low]}, "expected_batch_size": [8, 16]} for low in (0.1, 0.3)]
    space = Space.of([*rates, {"expected_batch_size": [32]}])
    assert space.ends() == [
        ({"expected_batch_size": batch, "learning_rate": low}, {"expected_batch_size": batch, "learning_rate": 2 * low})
        for low in (0.1, 0.3)
        for batch in (8, 16)
    ] + [({"expected_batch_size": 32},)]
    assert [ends[0] for ends in space.ends()] == [kind for _, kind in space.kinds()]


def test_draws_follow_the_space_and_know_their_kind() -> None:
    space = Space.of([{"weight": 3, **SPACE}, {"mechanism": "static", "learning_rate": 0.1}])
    entropy, drawn = FixedSeed(3), Counter[int]()
    for _ in range(3000):
        number, options = space.draw(entropy)
        drawn[number] += 1
        assert space.kind_of(options) == number
        if number < 6:
            assert 0.001 <= options["learning_rate"] <= 0.02
            configuration = space.kinds()[number][1]
            assert {name: options[name] for name in ("mechanism", "expected_batch_size")} == {
                name: configuration[name] for name in ("mechanism", "expected_batch_size")
            }
    shares = [drawn[number] / 3000 for number in range(7)]
    assert shares == pytest.approx([0.125] * 6 + [0.25], abs=0.03)


def test_a_range_is_uniform_in_the_logarithm() -> None:
    entropy, one = FixedSeed(5), Range("log_uniform", 0.01, 1.0)
    assert sum(one.draw(entropy) < 0.1 for _ in range(2000)) / 2000 == pytest.approx(0.5, abs=0.05)


def test_points_outside_the_space_have_no_kind() -> None:
    space = Space.of(SPACE)
    inside = {"mechanism": "static", "learning_rate": 0.01, "expected_batch_size": 32}
    assert space.kind_of(inside) == 0
    for change in ({"learning_rate": 0.5}, {"expected_batch_size": 16}, {"mechanism": "rldp"}, {"epochs": 3}):
        assert space.kind_of(inside | change) is None


def test_a_space_comes_back_from_json() -> None:
    space = Space.of(SPACE)
    again = Space.of(json.loads(json.dumps(space.to_json(), sort_keys=True)))
    assert again == space
    assert again.kinds() == space.kinds()
    assert again.kinds() == Space.of(dict(reversed(SPACE.items()))).kinds()


@pytest.mark.parametrize(
    ("space", "named"),
    [
        ({}, "search.space"),
        ([], "search.space"),
        (None, "search.space"),
        ({"learning_rate": 0.1}, "one point"),
        ({"learning_rate": [0.1]}, "one point"),
        ({"expected_batch_size": [8, 8]}, "search.space.expected_batch_size"),
        ({"rank": [4, 8]}, "search.space.rank"),
        ({"unit": ["a", "b"]}, "search.space.unit"),
        ({"max_length": [8, 16]}, "search.space.max_length"),
        ({"options.init_from": ["a", "b"]}, "search.space.options.init_from"),
        ({"options.dimension": [1, 2]}, "search.space.options.dimension"),
        ({"options.noise_multiplier": [1, 2]}, "search.space.options.noise_multiplier"),
        ({"options.policy": ["a", "b"]}, "search.space.options.policy"),
        ({"options.file": ["a", "b"]}, "search.space.options.file"),
        ({"options.path": ["a", "b"]}, "search.space.options.path"),
        ({"learning_rate": {"log_uniform": [0.1, 0.01]}}, "search.space.learning_rate"),
        ({"learning_rate": {"log_uniform": [0, 0.01]}}, "search.space.learning_rate"),
        ({"learning_rate": {"normal": [0, 1]}}, "search.space.learning_rate"),
        ({"batch": {"uniform": [8, 64]}}, "search.space.batch"),
        ({"learning_rate": [float("nan"), 1.0]}, "search.space.learning_rate"),
        ({"expected_batch_size": [list(range(3))]}, "search.space.expected_batch_size"),
        ({"learning_rate": [n / 1000 for n in range(1, 300)]}, "search.space"),
        ([{"weight": 0, "expected_batch_size": [8, 16]}], "weight"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_by_its_entry(space: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Space.of(space)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"candidates": 1}, "search.candidates"),
        ({"candidates": 0.5}, "search.candidates"),
        ({"candidates": None}, "search.candidates"),
        ({"candidates": float("inf")}, "search.candidates"),
        ({"shape": -1}, "search.shape"),
        ({"most": 3}, "search.most"),
        ({"score": "best"}, "search.score"),
        ({"score": {"on": "raw"}}, "search.score.on"),
        ({"score": {"clip": 0}}, "search.score.clip"),
        ({"score": {"clip": float("inf")}}, "search.score.clip"),
        ({"score": {"noise_multiplier": -1}}, "search.score.noise_multiplier"),
        ({"score": {"mean": 1}}, "search.score.mean"),
        ({"time_limit": 60}, "search.time_limit"),
        ({"bound": "renyi"}, "search.bound"),
        ({"together": 0}, "search.together"),
        ({"again": "yes"}, "search.again"),
        ({"number": 10}, "search.number"),
    ],
)
def test_settings_of_a_search_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SearchSettings.of({"space": SPACE, "candidates": 10} | changes)


@pytest.mark.parametrize("name", ["learning_rate", "options.max_grad_norm"])
def test_a_file_that_is_the_space_itself_says_where_it_belongs(tmp_path: Path, name: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(f"{name}: {{log_uniform: [1e-3, 2e-2]}}\n")
    with pytest.raises(ConfigError, match=rf"search\.{name}: stands outside the space\. Fix: indent it under `space:`"):
        SearchSettings.of(path, candidates=4)


def test_a_file_is_read_as_yaml_says(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("space: {learning_rate: {log_uniform: [1e-3, 2e-2]}}\nshape: .inf\nscore: public\n")
    found = SearchSettings.of(path, candidates=4)
    assert found.law.shape == math.inf
    assert found.score.on == "public"
    assert found.law.uncapped_mean == pytest.approx(4)


@pytest.mark.parametrize("text", ["space: [", "- 1\n- 2\n", "space: {batch: [8, 16]}\nspace: {batch: [8]}\n"])
def test_a_file_that_is_no_search_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="search"):
        SearchSettings.of(path, candidates=4)
    with pytest.raises(ConfigError, match="search"):
        SearchSettings.of(tmp_path / "none.yaml", candidates=4)


def test_a_former_name_in_a_space_is_kept_as_written_and_sets_the_same(tmp_path: Path) -> None:
    """Certificates and plans of earlier searches number their kinds in the order of names."""
    space = Space.of({"batch": [8, 16], "learning_rate": [0.1, 0.2]})
    assert [set(kind) for _, kind in space.kinds()] == [{"batch", "learning_rate"}] * 4
    asked = settings_of(TuneSettings(epsilon=1), space.kinds()[0][1])
    assert (asked.expected_batch_size, asked.learning_rate) == (8, 0.1)
    with pytest.raises(ConfigError, match=r"search\.space\.batch: is the former name of expected_batch_size"):
        Space.of({"batch": [8], "expected_batch_size": [16]})


def test_a_folder_of_an_earlier_version_is_read_with_the_names_and_defaults_of_this_one() -> None:
    known = {"epsilon": 8.0, "batch": 16.0, "rows": 4, "device": "cpu", "rank": 2, "run_id": "a"}
    found = as_written_now(known)
    assert (found["expected_batch_size"], found["momentum"], found["run_id"]) == (16.0, 0.9, "a")
    assert not {"batch", "rows", "device", "physical_batch_size"} & set(found)
