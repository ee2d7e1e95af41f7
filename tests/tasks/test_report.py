"""The report: one page that needs nothing else, pictures, and tables that DVC reads."""

from __future__ import annotations

import base64
import csv
import json
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import pytest
from tiny_pipeline import read_json

from dptune.errors import DataError
from tasks.drawing import over_seeds, save
from tasks.experiment.results import GUARANTEE
from tasks.report import experiment as module
from tasks.report.experiment import read_results, write_report

PICTURES = ("perplexity.png", "epsilon.png", "curves.png")


def result(mechanism: str = "static", certified: float | str = 2.0, **changes: Any) -> dict[str, Any]:
    """What a cell's result.json says."""
    history = [
        {"step": n, "releases": n, "public_perplexity": 9.0 - n, "eval_sample_perplexity": 8.0 - n}
        | {"epsilon_published": 0.1 * n, "epsilon_noise_only": 0.2 * n, "epsilon_certified": 0.2 * n}
        for n in (1, 2)
    ]
    made = {
        "label": f"small.{mechanism}.seed0",
        "model": "small",
        "mechanism": mechanism,
        "budget_epsilon": None if certified == "inf" else certified,
        "seed": 0,
        "unit": "record",
        "units": 144,
        "delta": 1e-5,
        "accounting": "certified",
        "telemetry": "research",
        "guarantee": GUARANTEE["research"],
        "data": "SYNTHETIC private cohort; no real patient",
        "synthetic": True,
        "noise_multiplier": 1.1,
        "sample_rate": 0.1,
        "releases": 2,
        "epsilon_published": "inf" if certified == "inf" else 1.5,
        "epsilon_noise_only": certified,
        "epsilon_certified": certified,
        "leaks": ["no noise"] if certified == "inf" else [],
        "before": {"public_perplexity": 9.0, "eval_perplexity": 8.0},
        "after": {"public_perplexity": 7.0, "eval_perplexity": 6.0 if mechanism == "static" else 5.0},
        "history": history,
        "pairs": ["model.0.attn", "model.1.attn"],
        "knobs": [{"releases": 1, "noise_multiplier": 1.1, "radius_0": 1.0}],
        "seconds": 1.2,
        "device": "cpu",
        "inputs": {},
    }
    return made | changes


def private(one: dict[str, Any]) -> dict[str, Any]:
    """The same under private telemetry."""

    def stripped(point: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in point.items() if not key.startswith("eval")}

    return one | {
        "telemetry": "private",
        "guarantee": GUARANTEE["private"],
        "before": stripped(one["before"]),
        "after": stripped(one["after"]),
        "history": [stripped(point) for point in one["history"]],
    }


class Page(HTMLParser):
    """What a page shows, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attributes if name in ("src", "href", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.words += data


def page(directory: Path) -> Page:
    return Page((directory / "report.html").read_text(encoding="utf-8"))


RESULTS = [result(), result("nonprivate", "inf")]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    write_report(RESULTS, directory, "tiny")
    return directory


def test_the_page_needs_nothing_else(written: Path) -> None:
    made, text = page(written), (written / "report.html").read_text()
    assert len(made.loaded) == len(PICTURES)
    assert all(source.startswith("data:image/png;base64,") for source in made.loaded)
    assert not re.search(r"https?://|file:|@import|url\(|<script|<link|<iframe", text)
    for source, name in zip(made.loaded, PICTURES, strict=True):
        assert base64.b64decode(source.split(",", 1)[1]) == (written / name).read_bytes()


def test_the_first_lines_say_what_is_guaranteed_and_that_data_is_made_up(written: Path) -> None:
    first = page(written).words.split("Experiment “")[0]
    assert GUARANTEE["research"] in first
    assert "SYNTHETIC data" in first


def test_the_table_has_every_cell_best_first(written: Path) -> None:
    words = page(written).words
    assert words.index("small.nonprivate.seed0") < words.index("small.static.seed0")
    assert "small, not fine-tuned" in words
    assert "∞" in words
    assert "no noise" in words
    assert "6.0000" in words


def test_the_pictures_are_pictures(written: Path) -> None:
    for name in PICTURES:
        height, width, _ = matplotlib.image.imread(BytesIO((written / name).read_bytes()), format="png").shape
        assert min(height, width) > 200


def test_metrics_and_plots_parse(written: Path) -> None:
    metrics = read_json(written / "metrics.json")
    assert set(metrics) == {"small.static.seed0", "small.nonprivate.seed0"}
    assert metrics["small.static.seed0"]["epsilon_certified"] == 2.0
    assert metrics["small.static.seed0"]["eval_perplexity"] == 6.0
    points = read_json(written / "plots" / "perplexity.json")
    assert [point["perplexity"] for point in points] == [6.0], "an infinite epsilon has no place on the axis"
    with (written / "plots" / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["cell"] for row in rows} == set(metrics)
    assert [float(row["perplexity"]) for row in rows] == [7.0, 6.0, 7.0, 6.0]
    for path in (written / "metrics.json", written / "plots" / "perplexity.json"):
        json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_private_telemetry_is_said_and_shows_public_figures_alone(tmp_path: Path) -> None:
    write_report([private(one) for one in RESULTS], tmp_path, "tiny")
    words = page(tmp_path).words
    assert GUARANTEE["private"] in words
    assert GUARANTEE["research"] not in words
    assert "eval perplexity" not in words
    assert read_json(tmp_path / "metrics.json")["small.static.seed0"].get("eval_perplexity") is None


def test_mixed_telemetry_says_both(tmp_path: Path) -> None:
    write_report([private(RESULTS[0]), RESULTS[1]], tmp_path, "tiny")
    words = page(tmp_path).words
    assert GUARANTEE["private"] in words
    assert GUARANTEE["research"] in words


def test_real_data_is_not_called_synthetic(tmp_path: Path) -> None:
    write_report(
        [one | {"synthetic": False, "data": "UCI Diabetes: real encounters"} for one in RESULTS], tmp_path, "x"
    )
    assert "SYNTHETIC" not in page(tmp_path).words


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    changes = {"label": evil, "model": evil, "mechanism": evil, "data": evil, "leaks": [evil], "unit": evil}
    write_report([result(certified="inf") | changes], tmp_path, evil)
    made = page(tmp_path)
    assert "script" not in made.tags
    assert made.words.count(evil) >= 4


def test_one_private_cell_alone_is_a_report(tmp_path: Path) -> None:
    write_report([result("nonprivate", "inf")], tmp_path, "tiny")
    assert read_json(tmp_path / "plots" / "perplexity.json") == []


def moved(**changes: Any) -> dict[str, Any]:
    """A cell whose controller acted twice, on two adapters."""
    rows = [
        {"releases": n, "noise_multiplier": 1.1, "radius_0": 0.1, "radius_1": 0.2 * n, "weight_0": 0.6, "weight_1": 0.8}
        for n in (1, 2)
    ]
    rows[1]["controller_reward"] = 0.3
    return result("rldp", label="small.rldp.seed0", knobs=rows, **changes)


def test_what_a_controller_did_is_a_picture(tmp_path: Path) -> None:
    write_report([*RESULTS, moved()], tmp_path, "tiny")
    picture = (tmp_path / "controllers" / "small.rldp.seed0.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    made = page(tmp_path)
    assert base64.b64encode(picture).decode() in made.loaded[-1]
    assert "small.rldp.seed0: clip radii" in made.words
    assert [path.name for path in (tmp_path / "controllers").iterdir()] == ["small.rldp.seed0.png"]
    write_report(RESULTS, tmp_path, "tiny")
    assert not list((tmp_path / "controllers").iterdir()), "pictures of an earlier experiment are gone"


def test_a_reward_that_is_infinite_or_missing_draws(tmp_path: Path) -> None:
    one = moved()
    one["knobs"][1]["controller_reward"] = "-inf"
    write_report([one], tmp_path, "tiny")
    assert (tmp_path / "controllers" / "small.rldp.seed0.png").exists()


def test_several_seeds_show_mean_and_spread(tmp_path: Path) -> None:
    """Sample standard deviation of 5, 6 and 7 is 1."""
    cells = [
        result(seed=seed, label=f"small.static.seed{seed}", after={"public_perplexity": 7.0, "eval_perplexity": value})
        for seed, value in ((0, 5.0), (1, 6.0), (2, 7.0))
    ]
    write_report(cells, tmp_path, "tiny")
    words = page(tmp_path).words
    assert "standard deviation" in " ".join(words.split())
    assert "6.0000" in words
    assert "1.0000" in words
    assert "Every cell" in words
    write_report(cells[:1], tmp_path, "tiny")
    assert "Every cell" not in page(tmp_path).words


def test_totals_are_stated_for_each_unit_and_never_mixed(tmp_path: Path) -> None:
    write_report([result(), result(seed=1), result("dp_lora_fed", unit="client", units=9)], tmp_path, "tiny")
    words = " ".join(page(tmp_path).words.split())
    assert "at most ε = 4, δ = 2e-05 about one record" in words
    assert "at most ε = 2, δ = 1e-05 about one client" in words
    assert "cannot be compared or added" in words


def test_cells_of_another_accounting_are_another_group() -> None:
    groups = over_seeds([result(), result(accounting="published"), result(seed=1)], "eval_perplexity")
    assert sorted(len(group.results) for group in groups) == [1, 2]


def place(directory: Path, *results: dict[str, Any]) -> Path:
    names = []
    for one in results:
        names.append(f"{one['label']}-0")
        (directory / names[-1]).mkdir()
        (directory / names[-1] / "result.json").write_text(json.dumps(one))
    (directory / "experiment.json").write_text(json.dumps({"name": "tiny", "cells": names}))
    return directory / "experiment.json"


def test_only_listed_results_are_read(tmp_path: Path) -> None:
    experiment = place(tmp_path, *RESULTS)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "result.json").write_text("{}")
    assert read_results(experiment, tmp_path) == RESULTS


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_missing_or_torn_result_is_named(tmp_path: Path, content: str | None) -> None:
    experiment = place(tmp_path, *RESULTS)
    path = tmp_path / "small.static.seed0-0" / "result.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(DataError, match=r"small\.static\.seed0-0/result\.json.*Fix: run the experiment"):
        write_report(read_results(experiment, tmp_path), tmp_path, "tiny")


@pytest.mark.parametrize("content", [None, "", "{}", '{"cells": []}'])
def test_a_missing_or_empty_experiment_is_named(tmp_path: Path, content: str | None) -> None:
    experiment = tmp_path / "experiment.json"
    if content is not None:
        experiment.write_text(content)
    with pytest.raises(DataError, match=r"experiment\.json"):
        write_report(read_results(experiment, tmp_path), tmp_path, "tiny")


def test_nothing_is_left_of_an_interrupted_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(module, "_page", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_report(RESULTS, tmp_path, "tiny")
    assert (tmp_path / "report.html").read_text() == "old"
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("worth", ["inf", "nan"])
@pytest.mark.parametrize("beside", [0, 1])
def test_a_cell_that_diverged_does_not_end_the_report(tmp_path: Path, worth: str, beside: int) -> None:
    """Cells of older versions stand as finished with such figures; a page of them alone is drawn too."""
    figures = {"public_perplexity": worth, "eval_perplexity": worth}
    point = {"step": 1, "releases": 1, "public_perplexity": worth, "eval_sample_perplexity": worth}
    point |= {"epsilon_published": 1.0, "epsilon_noise_only": 1.0, "epsilon_certified": 1.0}
    diverged = [
        result(
            "quantile", before=figures, after=figures, history=[point], seed=seed, label=f"small.quantile.seed{seed}"
        )
        for seed in (0, 1)
    ]
    write_report([*diverged, *[result()] * beside], tmp_path / "report", "tiny")
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_a_picture_that_the_disk_has_no_room_for_is_named(tmp_path: Path) -> None:
    full = tmp_path / "curves.png"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        save(plt.figure(), full)
    assert caught.value.filename == str(full)
