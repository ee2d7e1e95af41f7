"""A cell's figures: the few that MLflow shows, and all of them in a table."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import mode

from tasks.mlflow.cell_run import CellRun, main_metrics, main_names, steps_table
from tasks.mlflow.tracking import LATER

#: What a step of a learned controller on a model of 48 layers logs.
MANY = {f"{name}_{layer}": float(layer) for name in ("radius", "weight") for layer in range(48)}
STEP = {"noise_multiplier": 0.5, "batch_loss": 5.0, "epsilon_certified": math.inf, "reward": 0.1, **MANY}


def cell_run(directory: Path) -> CellRun:
    return CellRun(LATER, "cell", directory / "mlflow_run", {}, {})


def rows(directory: Path) -> list[dict[str, Any]]:
    table = steps_table(directory)
    assert table is not None
    with table.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_cell_shows_at_most_25_figures_and_no_infinity() -> None:
    shown = main_metrics(STEP)
    assert shown == {"noise_multiplier": 0.5, "radius": 23.5, "batch_loss": 5.0}
    assert len(main_metrics(dict.fromkeys((*STEP, *main_names()), 1.0))) == len(set(main_names())) <= 25


def test_every_figure_is_shown_to_who_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPTUNE_MLFLOW_METRICS", "all")
    assert main_metrics(STEP) == STEP


def test_all_figures_of_all_steps_are_in_the_table(tmp_path: Path) -> None:
    run = cell_run(tmp_path)
    run.log(1, STEP)
    run.log(2, {"noise_multiplier": 0.25, "late": 1.0})
    first, second = rows(tmp_path)
    assert {name: float(value) for name, value in first.items() if value} == {"step": 1.0, **STEP}
    assert {name: float(value) for name, value in second.items() if value} == {
        "step": 2,
        "noise_multiplier": 0.25,
        "late": 1,
    }
    assert mode(tmp_path / "steps.jsonl") == mode(tmp_path / "steps.csv") == 0o600


def test_of_a_step_that_a_killed_process_repeats_the_last_row_counts(tmp_path: Path) -> None:
    cell_run(tmp_path).log(1, {"a": 1.0})
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "a": 3.0}\n{"step": 3, "a"\n')
    cell_run(tmp_path).log(2, {"a": 2.0})
    assert [(row["step"], row["a"]) for row in rows(tmp_path)] == [("1", "1.0"), ("2", "2.0")]


def test_a_run_without_steps_has_no_table(tmp_path: Path) -> None:
    assert steps_table(tmp_path) is None


def test_a_full_disk_stops_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cell_run(tmp_path)
    monkeypatch.setattr("tasks.mlflow.cell_run.os.open", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    run.log(1, {"noise_multiplier": 1.0})
    assert not (tmp_path / "steps.jsonl").exists()
