"""Metrics are declared once, and a private one is never measured, kept or sent under private telemetry."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import read_json, static

from dptune.core.metric import CHANGES, LABEL_SCORES, Metric
from dptune.job.delivery import card
from dptune.training.evaluation import Scores
from tasks import metrics
from tasks.charts.curves import curves
from tasks.charts.looks import looks
from tasks.experiment import quality
from tasks.experiment.cell_list import write_list
from tasks.experiment.finetune import run_cell
from tasks.mlflow import page as tracking_page
from tasks.mlflow.cell_run import CellRun, main_metrics, main_names
from tasks.mlflow.experiments import VIEW, VIEWS
from tasks.mlflow.tracking import LATER
from tasks.paths import EXPERIMENT, REPORT
from tasks.report.experiment import CELLS, METRICS, PAGE, report

BITS = Metric(
    "eval_bits",
    "held-out bits per token",
    "log2 of the perplexity",
    better="lower",
    unit="bits",
    shown=("scores", "curves", "tracking", "column", "comparison"),
    section=metrics.UTILITY,
    measure="bits",
    measured_at=("points", "end"),
)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Metric:
    """A metric that is declared as a new one is: an entry in the list, and its function."""
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, BITS))
    monkeypatch.setitem(quality.MEASURES, "bits", lambda model, tokens, rows, autocast: 1.25)
    return BITS


def test_every_metric_has_one_declaration_and_a_name_for_readers() -> None:
    found = metrics.metrics()
    assert len({one.name for one in found}) == len(found)
    assert all(one.title and one.better in ("lower", "higher", "") for one in found)
    assert all(one.measure in quality.MEASURES for one in found if one.measure)
    assert all(one.measured_at for one in found if one.measure)


def test_a_metric_is_private_unless_it_says_what_else_it_is_of() -> None:
    assert Metric("x", "x").private
    assert {one.name for one in metrics.metrics() if one.private} >= {
        "eval_perplexity", "eval_sample_perplexity", "eval_accuracy", "eval_f1", "eval_calibration_error", "batch_loss",
        "eval_largest_class", "batch_units", "clipped_fraction", "steps_share_to_best_baseline",
        "audit_membership_calibrated_auc", "audit_canaries_shadows_auc",
    }  # fmt: skip


@pytest.mark.parametrize("metric", [one for one in (*metrics.metrics(), BITS) if one.private], ids=lambda one: one.name)
def test_no_private_metric_is_sent_or_kept_under_private_telemetry(
    metric: Metric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "METRICS", (*metrics.METRICS, BITS))
    figures = {metric.name: 0.123456, "learning_rate": 0.5}
    for telemetry in ("private", "research"):
        (tmp_path / telemetry).mkdir()
        run = CellRun(LATER, "cell", tmp_path / telemetry / "mlflow_run", {}, {}, timed=telemetry == "research")
        run.log(1, figures)
        kept = "".join(path.read_text() for path in (tmp_path / telemetry).iterdir())
        assert ("0.123456" in kept) == (telemetry == "research")
        assert "0.5" in kept
        assert (metric.name in metrics.allowed(figures, telemetry)) == (telemetry == "research")
    assert metric not in metrics.measured("private", "end")
    assert metric not in metrics.measured("private", "points")
    assert metrics.tool_name(metric.name) not in json.dumps([tracking_page._state("private", view) for view in VIEWS])


def test_every_public_metric_stays_under_private_telemetry() -> None:
    public = {one.name: 1.0 for one in metrics.metrics() if not one.private}
    assert metrics.allowed(public, "private") == public


def test_what_is_not_declared_counts_as_private(caplog: pytest.LogCaptureFixture) -> None:
    """A step's knobs are the mechanism's own names; not even they pass under the name of a private metric."""
    figures, knobs = {"eval_new": 1.0, "learning_rate": 0.5}, {"radius_0": 2.0, "mine": 3.0, "batch_loss": 4.0}
    metrics._UNDECLARED.clear()
    for _ in range(2):
        assert metrics.allowed(figures, "private", knobs) == {"learning_rate": 0.5, "radius_0": 2.0, "mine": 3.0}
    assert caplog.text.count("metric eval_new is not declared, so private telemetry leaves it out") == 1
    assert "Fix: declare it in tasks/metrics.py" in caplog.text
    assert metrics.allowed(figures, "research", knobs) == figures | knobs
    assert metrics.allowed({"mine": 9.0}, "private", knobs)["mine"] == 3.0, "a figure does not pass as a knob"


def test_every_figure_of_a_private_run_is_declared(pipeline: Path) -> None:
    """What a run sends under private telemetry, but for its knobs, has an entry: nothing is left out by mistake."""
    metrics._UNDECLARED.clear()
    cell = static({"experiment": {"telemetry": "private"}})
    run_cell(cell, "cpu", LATER)
    kept = (cell.directory / "steps.jsonl").read_text()
    assert not metrics._UNDECLARED
    for name in ("learning_rate", "gradient_norm", "public_perplexity", "epsilon_certified", "radius_0"):
        assert f'"{name}"' in kept, name


def test_every_score_of_a_classifier_is_declared() -> None:
    assert [one.name for one in LABEL_SCORES] == [field.name for field in fields(Scores)]
    pair = {one.name: [0.25, 0.5] for one in LABEL_SCORES}
    shown = card._scores(pair)
    assert all(f"{one.title} 0.25 before, 0.5 after" in shown for one in CHANGES)
    assert {one.name for one in metrics.HELD_OUT_SCORES} == {f"eval_{one.name}" for one in LABEL_SCORES} - {"eval_loss"}


def test_a_new_score_of_a_classifier_stands_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "CHANGES", (*CHANGES, Metric("brier", "Brier score", "the Brier score is squared")))
    shown = card._scores({one.name: [0.25, 0.5] for one in LABEL_SCORES} | {"brier": [0.4, 0.3]})
    assert "Brier score 0.4 before, 0.3 after" in shown
    assert "the Brier score is squared." in shown


def view() -> dict[str, Any]:
    """MLflow's saved view."""
    return tracking_page._state("research", VIEW)


@pytest.mark.usefixtures("quick_pictures")
def test_a_new_metric_is_in_every_place_that_lists_metrics(pipeline: Path, planted: Metric) -> None:
    cell = static()
    result = run_cell(cell, "cpu")
    assert result["after"]["eval_bits"] == result["before"]["eval_bits"] == 1.25
    assert [point["eval_bits"] for point in result["history"]] == [1.25] * len(result["history"])
    assert main_metrics({"eval_bits": 1.25}) == {"eval_bits": 1.25}
    assert "eval_bits" in main_names()
    assert "metrics.`eval_bits`" in view()["selectedColumns"]
    assert any(chart.get("metricKey") == "eval_bits" for chart in view()["compareRunCharts"])
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    write_list(EXPERIMENT, "tiny", [cell.directory])
    report("tiny")
    page = (REPORT / PAGE).read_text(encoding="utf-8")
    assert ">held-out bits per token</th>" in page
    assert 'title="log2 of the perplexity; lower is better"' in page
    assert read_json(REPORT / CELLS)[cell.label]["eval_bits"] == 1.25
    assert read_json(REPORT / METRICS)["eval_bits"] == 1.25
    drawn = curves([result], looks(["static"]))
    assert drawn is not None
    assert "held-out bits per token" in [panel.title for panel in drawn.panels]


def test_a_new_private_metric_is_not_measured_under_private_telemetry(pipeline: Path, planted: Metric) -> None:
    cell = static({"experiment": {"telemetry": "private"}})
    result = run_cell(cell, "cpu")
    assert "eval_bits" not in json.dumps(result)
    assert not [path for path in cell.directory.rglob("*.json*") if "eval_bits" in path.read_text()]
