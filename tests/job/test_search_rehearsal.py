"""Rehearsal: public records choose, and the private ones see the choice once, at the full budget."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError, DivergedError, DptuneError
from dptune.core.files import locked, private_directory, write_text
from dptune.job import tune as tune_module
from dptune.job.result import HELD_OUT, RunResult
from dptune.job.search import rehearsal as module
from dptune.job.search.rehearsal import Rehearsed, rehearsal_file, rehearsed
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.privacy.run_folder import RunFolder

SEARCH = {"space": {"learning_rate": {"log_uniform": [0.001, 0.05]}}, "candidates": 3, "score": "rehearsal"}


def tuned(out: Path, **more: Any) -> Any:
    given = {"epsilon": 8, "delta": 1e-3, "unit": "customer_id", "search": SEARCH, "public": rows(40, 40)} | more
    return dptune.tune(checkpoint(), rows(), out=out, **QUICK, **given)


def test_the_best_on_public_records_is_trained_once_within_the_whole_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def trial(base: Any, weights: Any, own: Any, schedule: Any, mechanism: Any, records: Any, rate: float) -> float:
        tried.append(rate)
        return [9.0, 3.0, math.inf][len(tried) - 1]

    monkeypatch.setattr(module, "trial", trial)
    found = tuned(tmp_path / "out")
    assert len(tried) == 3
    assert found.certificate is None
    assert 7.5 < found.epsilons.certified <= 8
    assert json.loads((tmp_path / "out" / "cell.json").read_text())["learning_rate"] == tried[1]
    again = tuned(tmp_path / "out")  # what was chosen stays chosen
    assert len(tried) == 3
    assert again.ledger.chain == found.ledger.chain
    known = json.loads(rehearsal_file(tmp_path / "out").read_text())
    assert [one[1] for one in known["tried"]] == ["9.0", "3.0", "inf"]
    with pytest.raises(ConfigError, match=r"out: .* rehearsed for something else \(epsilon\)"):
        tuned(tmp_path / "out", epsilon=4)
    assert tuned(tmp_path / "out").ledger.chain == found.ledger.chain, "taking it back goes on"
    assert len(tried) == 3


def test_another_number_of_units_or_telemetry_is_another_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, search, out = TuneSettings(epsilon=8.0, **QUICK), SearchSettings.of(SEARCH), tmp_path / "out"
    tried: list[int] = []

    def rehearse(source: Any, base: Any, settings: TuneSettings, search: Any, units: int, *_: Any) -> Rehearsed:
        tried.append(units)
        return Rehearsed(settings, (({"learning_rate": 0.01}, 2.0),))

    def ask(units: int = 20, **changes: Any) -> None:
        given: Any = None  # neither source nor model are read
        rehearsed(given, given, replace(chosen, **changes), search, units, out)

    monkeypatch.setattr(module, "rehearse_space", rehearse)
    for changes in ({}, {}, {"physical_batch_size": 16}, {"checkpoint_every": 3}, {"device": "cpu"}):
        ask(**changes)
    assert tried == [20], "the same is asked"
    ask(21)
    ask()
    ask(telemetry="private")
    ask()
    assert tried == [20, 21, 20, 20, 20]
    write_text(out / "ledger.jsonl", "")
    for units, changed, name in ((21, {}, "units"), (20, {"telemetry": "private"}, "telemetry")):
        with pytest.raises(ConfigError, match=rf"rehearsed for something else \({name}\)"):
            ask(units, **changed)
    ask()


def test_two_calls_in_one_folder_do_not_rehearse_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later rehearsal, by command or function, would replace the choice of the run that the earlier one began."""
    monkeypatch.setattr(module, "rehearse_space", lambda *_: pytest.fail("it replaces the other's choice"))
    out = private_directory(tmp_path / "out")
    data, public = write_csv(tmp_path / "own.csv", rows()), write_csv(tmp_path / "public.csv", rows(40, 40))
    (tmp_path / "space.yaml").write_text(json.dumps(SEARCH))
    with locked(RunFolder(out).lock):
        with pytest.raises(DptuneError, match="out: another process works on it"):
            tuned(out)
        given = ["--data", str(data), "--unit", "customer_id", "--public", str(public), "--epsilon", "8"]
        quick = ["--epochs", "2", "--expected-batch-size", "8", "--rank", "2", "--search", str(tmp_path / "space.yaml")]
        command = ["tune", "--model", str(checkpoint()), *given, *quick, "--out", str(out)]
        done = CliRunner().invoke(app, command)
    assert "another process works on it" in done.stderr, done.output
    assert done.exit_code


def test_a_second_rehearsal_is_told_what_the_records_paid_and_a_dry_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "trial", lambda *_: 3.0)
    tuned(tmp_path / "first")
    assert "paid before" not in caplog.text
    with monkeypatch.context() as patched:
        patched.setattr(tune_module, "run_here", lambda *_: pytest.fail("the warning comes before", pytrace=False))
        with pytest.raises(pytest.fail.Exception):
            tuned(tmp_path / "second")
    assert "these records paid before (once, epsilon" in caplog.text
    data, public = write_csv(tmp_path / "own.csv", rows()), write_csv(tmp_path / "public.csv", rows(40, 40))
    (tmp_path / "space.yaml").write_text(json.dumps(SEARCH))
    given = ["--data", str(data), "--unit", "customer_id", "--public", str(public), "--epsilon", "8"]
    quick = ["--epochs", "2", "--expected-batch-size", "8", "--rank", "2", "--search", str(tmp_path / "space.yaml")]
    before = sorted(tmp_path.iterdir())
    dry = ["tune", "--model", str(checkpoint()), *given, *quick, "--out", str(tmp_path / "third"), "--dry-run"]
    done = CliRunner().invoke(app, dry)
    assert done.exit_code == 0, done.output
    assert "these records paid before (once, epsilon" in done.stderr
    assert "learning_rate" in done.stdout
    assert sorted(tmp_path.iterdir()) == before
    done = CliRunner().invoke(app, dry[:-1])
    assert done.exit_code == 0, done.output
    kept = RunResult.read(tmp_path / "third" / "result.json").by_records()[HELD_OUT]["perplexity"]
    assert f"{kept[1]:.6g}" in done.stdout, "the owner alone is shown it, for the delivered folder is not to"
    assert f"it stays in {tmp_path / 'third' / 'result.json'}" in done.stdout


def test_micro_batches_of_a_rehearsal_are_not_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public records bring one row each; a private unit may bring more than a micro-batch of theirs holds."""
    sizes: list[int] = []

    def trial(base: Any, weights: Any, own: Any, *_: Any) -> float:
        sizes.append(own.physical_batch_size)
        return 3.0

    monkeypatch.setattr(module, "trial", trial)
    found = tuned(tmp_path / "out", records_per_unit=20)
    assert sizes == [16, 16, 16]
    assert found.epsilons.certified <= 8


def test_a_rehearsal_reads_no_private_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def look(source: Any, *_: Any) -> None:
        given.append(source)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "read_public", look)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "out")
    assert [(source.data, source.public) for source in given] == [(rows(40, 40), None)]


def test_a_rehearsal_needs_public_records_and_a_candidate_that_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="public"):
        tuned(tmp_path / "none", public=None)
    monkeypatch.setattr(module, "trial", lambda *_: math.inf)
    with pytest.raises(DivergedError, match="every candidate"):
        tuned(tmp_path / "out")
    assert not (tmp_path / "out" / "ledger.jsonl").exists()
