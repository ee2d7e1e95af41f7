"""What runs on the same records spent is never forgotten: not by a fresh start, nor by other settings."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from test_report import page, result
from tiny_pipeline import BUDGET, STEPS, read_json, static

from dptune.core.digits import at_most
from dptune.core.errors import DptuneError
from dptune.core.files import sha256, write_json
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder, Spending, set_aside
from dptune.training import run as running
from dptune.training.checkpoints import CheckpointError
from tasks.experiment import cell_training
from tasks.experiment.cell_training import crafted_canaries
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.mlflow import tracking
from tasks.paths import EXPERIMENT, RUNS
from tasks.report import experiment as report
from tasks.report.experiment import totals, unlisted_spendings, write_report

DATA = "SYNTHETIC private cohort; no real patient"


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_training, "draw_curves", lambda _, path: path.write_bytes(b"picture"))
    monkeypatch.setattr(report, "save", lambda _, path: path.write_bytes(b"picture"))


def killed_after_a_checkpoint(cell: Cell, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        real, saved = running.save_checkpoint, []

        def save(*args: Any) -> None:
            """The first one is written before anything is charged."""
            real(*args)
            saved.append(args)
            if len(saved) > 1:
                raise Killed

        patch.setattr(running, "save_checkpoint", save)
        with pytest.raises(Killed):
            run_cell(cell, "cpu")
    for ledger in opened:
        ledger.close()


def test_a_run_that_cannot_go_on_is_priced_into_the_next(
    pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static()
    killed_after_a_checkpoint(cell, opened, monkeypatch)
    # The start of the file, which says how many releases it relies on, is whole.
    checkpoint = cell.directory / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    spent = read_ledger(cell.directory / "ledger.jsonl").epsilons.certified
    advice = rf"dptune set-aside {re.escape(str(cell.directory))}.*{at_most(spent, 4)}"
    with pytest.raises(CheckpointError, match=advice):
        run_cell(cell, "cpu")
    kept, _ = set_aside(cell.directory)
    after = run_cell(cell, "cpu")
    assert after["releases"] == STEPS
    assert after["set_aside"] == [{"folder": kept.name, "epsilon_certified": spent}]
    together = after["epsilon_certified"] + spent
    assert f"with them, epsilon is {at_most(together, 4)} and delta 2e-05 (basic composition)" in after["guarantee"]
    write_json(EXPERIMENT, {"name": "tiny", "cells": [cell.directory.name]})
    monkeypatch.setattr(tracking, "send", lambda *_, **__: None)
    report.report()
    words = " ".join(page(Path("data/report")).words.split())
    assert kept.name in words
    assert f"2 runs together cost at most ε = {at_most(together)}, δ = 2e-05 about one record" in words
    assert together > BUDGET


def test_a_budget_that_was_spent_for_nothing_is_named_with_its_price(
    pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = static({"training": {"checkpoint_every": 50}})
    save, saved = running.save_checkpoint, []

    def first_only(*what: Any) -> None:
        """The checkpoint from before the first charge is written, and none after it."""
        if saved:
            raise Killed
        saved.append(save(*what))

    with monkeypatch.context() as patch:
        patch.setattr(running, "save_checkpoint", first_only)
        with pytest.raises(Killed):
            run_cell(cell, "cpu")
    for ledger in opened:
        ledger.close()
    with pytest.raises(DptuneError, match=rf"set-aside .* it has spent epsilon {BUDGET:.1g}"):
        run_cell(cell, "cpu")


@pytest.mark.parametrize("left", ["adapter", "checkpoint.safetensors", "history.jsonl"])
def test_results_without_their_ledger_are_never_written_over(pipeline: Path, left: str) -> None:
    """A new run in their folder would spend again and leave no trace of the first."""
    cell = static()
    run_cell(cell, "cpu")
    for name in ("ledger.jsonl", "result.json", *({"adapter", "history.jsonl"} - {left})):
        path = cell.directory / name
        path.rename(cell.directory / f"was-{name}")
    if left == "checkpoint.safetensors":
        (cell.directory / left).write_bytes(b"weights")
    before = {path.name: sha256(path) for path in cell.directory.iterdir() if path.is_file()}
    with pytest.raises(LedgerError, match=rf"{left}: has no ledger beside it.*counts as infinite"):
        run_cell(cell, "cpu")
    after = {path.name: sha256(path) for path in cell.directory.iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before
    assert not (cell.directory / "ledger.jsonl").exists()


def test_a_run_under_earlier_settings_is_counted(pipeline: Path) -> None:
    first = static()
    run_cell(first, "cpu")
    second = static({"training": {"learning_rate": 0.01}})
    run_cell(second, "cpu")
    assert first.directory != second.directory
    (earlier,) = others = unlisted_spendings(RUNS, [second.directory.name])
    assert earlier.folder == first.directory.name
    (total,) = totals([read_json(second.directory / "result.json")], others)
    assert (total.runs, total.others, total.delta) == (2, 1, 2e-5)
    assert total.epsilon == sum(
        read_ledger(cell.directory / "ledger.jsonl").epsilons.certified for cell in (first, second)
    )


def test_what_others_saw_is_no_canarys_score(
    pipeline: Path, opened: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coins and scores lie outside the folder: a fresh start tosses anew, a resumed run goes on."""
    cell = static({"canaries": {"crafted": 16}})
    killed_after_a_checkpoint(cell, opened, monkeypatch)
    seen = {"included": [1] * 16, "scores": [3.0] * 16, "moves": [1.0, None]}
    write_json(RunFolder(cell.directory).crafted, seen)
    resumed = crafted_canaries(cell)
    assert resumed is not None
    assert resumed.watched == 2
    set_aside(cell.directory)
    fresh = crafted_canaries(cell)
    assert fresh is not None
    assert fresh.watched == 0
    assert not fresh.scores.any()


def spending(folder: str, epsilon: float, *, unit: str = "record", data: str = DATA, problem: str = "") -> Spending:
    return Spending(folder, unit, data, 5, epsilon, 1e-5 if unit else 0.0, problem)


def test_the_page_adds_up_what_is_on_the_same_records(tmp_path: Path) -> None:
    others = [
        spending("a.set-aside-1", 0.5),
        spending("b", 0.25),
        spending("of other records", 7.0, data="another table"),
        spending("of patients", 9.0, unit="patient"),
    ]
    write_report([result(), result(seed=1)], tmp_path, "tiny", others=others)
    words = " ".join(page(tmp_path).words.split())
    assert "2 cells were trained on the same records" in words
    assert "learns at most ε = 4, δ = 2e-05" in words
    assert "With the 2 of them on these records, 4 runs together cost at most ε = 4.75, δ = 4e-05" in words
    assert all(one.folder in words for one in others)
    write_report([result()], tmp_path, "tiny")
    assert "runs that are not cells of this page" not in page(tmp_path).words


def test_what_nobody_can_tell_makes_every_total_infinite() -> None:
    lost = spending("lost", math.inf, unit="", data="", problem="its ledger is missing")
    found = totals([result(), result("dp_lora_fed", unit="client")], [lost])
    assert [(total.unit, total.others, total.epsilon) for total in found] == [
        ("client", 1, math.inf),
        ("record", 1, math.inf),
    ]
