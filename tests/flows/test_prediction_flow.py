"""The prediction flow: shards once, scores beside the grid's cells, answers, and a budget that stays spent."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import mode, nonprivate, read_json, static, write_params
from typer.testing import CliRunner
from work_here import work_of

from dptune.cli import app
from dptune.core.errors import ConfigError, DataError
from dptune.core.files import write_json, write_text
from dptune.privacy.spent_budgets.register import Register
from flows import prediction as module
from flows.common import processes
from flows.common.command import FlowError
from flows.prediction import prediction
from tasks.experiment.finetune import run_cell
from tasks.metrics import legible, tool_name
from tasks.mlflow import tracking
from tasks.paths import ANSWERS, ENSEMBLES, EXPERIMENT, PREDICTION, SPENT
from tasks.prediction import ensembles
from tasks.report.experiment import read_study
from tasks.report.prediction import METRIC
from tasks.stage import run_stage

pytestmark = pytest.mark.system

QUICK: dict[str, Any] = {
    "training": {"max_length": 64},
    "experiment": {"epsilons": [8], "cells_per_device": 2},
    "prediction": {
        "models": [2],
        "tuning": {"epochs": 1, "batch_size": 32},
        "epsilons": [8],
        "tokens": [16],
        "subsamples": [0.5],
        "records": 2,
        "serve": {"tokens": 16, "models": 2},
    },
}


def _cells() -> None:
    """Two finished cells: one without privacy, one at the protocols' epsilon."""
    chosen = [nonprivate(QUICK), static(QUICK)]
    for cell in chosen:
        write_text(cell.directory / "cell.json", cell.model_dump_json())
        run_cell(cell, "cpu", None)
    write_json(EXPERIMENT, {"name": "tiny", "cells": [cell.directory.name for cell in chosen]})


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one real process tune, and do all other work in this one, because imports take longer than a shard."""
    real = processes.run_process

    def run(label: str, command: list[str], **options: Any) -> None:
        if label == "2 models, process 1 of 2":
            real(label, command, **options)
            return
        work_of(command)

    monkeypatch.setattr(processes, "run_process", run)


def test_an_ensemble_is_tuned_scored_and_answers(server: str, pipeline: Path, one_process: None) -> None:
    _cells()
    folder = Path(prediction())
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("adapter_model.safetensors")}
    assert len(made) == 2
    assert mode(folder / "salt") == 0o600
    result = read_json(ANSWERS)
    rows = {row["label"]: row for row in result["rows"]}
    kinds = {label: row["kind"] for label, row in rows.items()}
    assert {"public", "nonprivate", "training", "answers", "published"} == set(kinds.values())
    assert all(row[METRIC] > 1 and row["perplexity_per_block"] > 1 for row in result["rows"])
    assert rows["pmixed.record.eps8.T16.N2.w0.2"]["epsilon_certified"] == pytest.approx(8, abs=1e-9)
    assert rows["pmixed_published.eps8.T16.N2.q0.5"]["epsilon_certified"] == "inf"
    assert rows["pmixed_published.eps8.T16.N2.q0.5"]["leaks"]
    page = (PREDICTION / "prediction.html").read_text()
    assert "NOT the figures on this page" in page
    assert "SYNTHETIC" in page
    assert "small.static.eps8.seed0" in page
    (shown, _) = read_study(EXPERIMENT)
    claims = {one["label"]: one["epsilon_published"] for one in shown}
    assert claims["small.static.eps8.seed0"] == rows["small.static.eps8.seed0"]["epsilon_published"], "one on all pages"
    _is_in_mlflow(rows)

    told = CliRunner().invoke(app, ["generate", "The patient", "--tokens", "3"])
    assert told.exit_code == 0, told.output
    assert "of 16 tokens left" in told.stderr
    assert "for one record" in told.stderr
    assert "these records paid before (2 times, together epsilon ∞" in " ".join(told.stderr.split())
    (spent,) = Register(SPENT).totals()
    assert [(part.what, part.entries) for part in spent.parts] == [("cell", 2), ("answers", 1)]
    assert spent.parts[1].bounded == pytest.approx(8, abs=1e-9)
    scores = sorted(folder.glob("scores-*/record-*.json"))
    assert len(scores) == 2
    made |= {path: path.stat().st_mtime_ns for path in scores}
    # Again: nothing is tuned or scored a second time, and what was spent stays spent.
    assert Path(prediction()) == folder
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert (folder / "ledger.jsonl").exists()
    write_params(QUICK, {"prediction": {"serve": {"tokens": 17}}})
    with pytest.raises(ConfigError, match=r"has answered with other settings \(tokens\)"):
        prediction()


def _is_in_mlflow(rows: dict[str, Any]) -> None:
    client = tracking.client()
    experiment = client.get_experiment_by_name("tiny")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    run = runs["pmixed.record.eps8.T16.N2.w0.2"]
    assert run.data.metrics[tool_name(METRIC)] == legible(METRIC, rows["pmixed.record.eps8.T16.N2.w0.2"][METRIC])
    assert run.data.params["unit"] == "record"
    # MLflow would keep infinity as the largest double.
    assert "epsilon/certified" not in runs["pmixed_published.eps8.T16.N2.q0.5"].data.metrics


def test_progress_of_work_in_a_flows_own_process_reaches_its_log(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect would let only warnings through, and no logger but its own."""
    from prefect.logging.handlers import APILogHandler  # ``flows`` has to be imported before prefect

    monkeypatch.chdir(tmp_path)
    run_stage(lambda: None)
    log = logging.getLogger("dptune")
    assert logging.getLogger("dptune.core.progress").isEnabledFor(logging.INFO)
    assert any(isinstance(handler, APILogHandler) for handler in log.handlers)


def test_what_cannot_be_is_refused_before_anything_is_tuned(server: str, pipeline: Path) -> None:
    write_params(QUICK, {"prediction": {"alpha": 3, "epsilons": [2]}})
    with pytest.raises(ConfigError, match="too small for one token"):
        prediction()
    assert not ENSEMBLES.exists()


def test_scores_go_on_after_a_kill(server: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part whose process died is named, and the next run scores its records alone, to the same results."""
    write_params(QUICK)
    killed: list[str] = []

    def dying(label: str, command: list[str], **_: Any) -> None:
        if "tasks.prediction.scores" in command and command[-4:-2] == ["1", "2"] and not killed:
            killed.append(label)
            raise RuntimeError("killed")
        work_of(command)

    monkeypatch.setattr(processes, "run_process", dying)
    with pytest.raises(FlowError, match="scores of 2 models: some failed"):
        prediction()
    (first,) = ENSEMBLES.glob("*/scores-*/record-*.json")
    assert not ANSWERS.exists()
    made = first.stat().st_mtime_ns
    folder = Path(prediction())
    assert first.stat().st_mtime_ns == made
    assert len(list(folder.glob("scores-*/record-*.json"))) == 2
    resumed = read_json(ANSWERS)["rows"]
    for file in folder.glob("scores-*/record-*.json"):
        file.unlink()
    prediction()
    assert read_json(ANSWERS)["rows"] == resumed
    next(folder.glob("scores-*/record-*.json")).write_text("{}")
    with pytest.raises(DataError, match=r"record-0000\d\.json: holds no score of a record .* once the file is gone"):
        prediction()


def test_a_shard_that_fails_is_named(
    server: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_params(QUICK)

    def broken(_plan: Any, shard: int, _device: str) -> None:
        if shard == 1:
            raise RuntimeError("no")

    monkeypatch.setattr(processes, "run_process", lambda _label, command, **_: work_of(command))
    monkeypatch.setattr(ensembles, "tune", broken)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 1
    summary, last = capsys.readouterr().err.splitlines()[-2:]
    assert "shard 1 of " in summary
    assert last.startswith("error: RuntimeError: no. Fix: the traceback is in data/failures.log")
