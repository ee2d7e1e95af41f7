"""What the end of a report says of its runs; private telemetry tells no time and no digest of records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_report import Page, result

from dptune.core.files import write_json
from tasks.report.about import about_runs
from tasks.report.experiment import write_report

pytestmark = pytest.mark.usefixtures("quick_pictures")


def written(runs: Path, **changes: Any) -> list[dict[str, Any]]:
    """Two cells' folders under ``runs``, and their results."""
    results = [result("static", **changes), result("quantile", **changes)]
    for one in results:
        folder = runs / str(one["mechanism"])
        folder.mkdir(parents=True)
        model = {"source": "org/model", "revision": "abc"}
        cell = {
            "experiment": "x",
            "mechanism": one["mechanism"],
            "seed": 0,
            "model": model,
            "inputs": {"data": "d" * 64},
        }
        rate = 0.1 if one["mechanism"] == "static" else 0.2
        training = {"learning_rate": rate, "epochs": 1}
        write_json(folder / "cell.json", cell | {"training": training})
        write_json(folder / "result.json", one)
        os.utime(folder / "result.json", (1_700_000_000, 1_700_000_000))
    return results


def test_what_made_the_runs_and_the_settings_of_all_and_of_each(tmp_path: Path) -> None:
    results = written(tmp_path / "runs")
    found = about_runs("my {study}", tmp_path / "runs", ["static", "quantile"], results)
    rows = dict(found.rows)
    assert rows["Weights from"] == "org/model at abc"
    assert rows["Digest of the training records"].startswith("d" * 16 + ",")
    assert rows["Last run finished"] == "2023-11-14 (UTC)"
    assert yaml.safe_load(found.settings) == {
        "seed": 0,
        "model": {"source": "org/model", "revision": "abc"},
        "training": {"epochs": 1},
        "cells": {
            results[0]["label"]: {"mechanism": "static", "training": {"learning_rate": 0.1}},
            results[1]["label"]: {"mechanism": "quantile", "training": {"learning_rate": 0.2}},
        },
    }
    assert "@misc{dptune_my__study_," in found.bibtex
    assert "year = {2023}" in found.bibtex
    write_report(results, tmp_path / "report", "mine", about=found)
    page = Page((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    assert "About this run" in page.words
    assert [link for link in page.links if link.startswith("data:text/yaml")] == [found.download]
    assert page.loaded == []


def test_private_telemetry_tells_no_time_and_no_digest(tmp_path: Path) -> None:
    results = written(tmp_path / "runs", telemetry="private")
    found = about_runs("mine", tmp_path / "runs", ["static", "quantile"], results)
    text = f"{found.rows}{found.settings}{found.bibtex}"
    # The digest's beginning and the day; a commit's name may hold four of the same letters.
    assert not any(hidden in text for hidden in ("d" * 16, "2023-", "{2023}", "year", "finished"))


def test_a_cell_whose_settings_are_gone_lends_its_name_to_no_other(tmp_path: Path) -> None:
    results, runs = written(tmp_path), tmp_path
    (runs / "static" / "cell.json").rename(runs / "static" / "gone.json")
    third = result("rldp")
    (runs / "rldp").mkdir()
    own = json.loads((runs / "quantile" / "cell.json").read_text()) | {"mechanism": "rldp"}
    write_json(runs / "rldp" / "cell.json", own)
    write_json(runs / "rldp" / "result.json", third)
    found = about_runs("x", runs, ["static", "quantile", "rldp"], [*results, third])
    assert yaml.safe_load(found.settings)["cells"] == {
        results[1]["label"]: {"mechanism": "quantile"},
        third["label"]: {"mechanism": "rldp"},
    }
