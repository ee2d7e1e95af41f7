"""Runs of ``dptune tune`` enter the register, from their start and once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.errors import ConfigError
from dptune.privacy.ledger import Ledger
from dptune.privacy.spent import Register, SpentTotal
from dptune.training.run import StepReport
from dptune.tuning import run as tuning_run

RECORDS = rows()


def tune(out: Path, records: Any = RECORDS, **settings: Any) -> Any:
    given = {"epsilon": 8, "delta": 1e-3, "unit": "customer_id", "out": out} | QUICK | settings
    return dptune.tune(checkpoint(), records, **given)


def total(folder: Path) -> SpentTotal:
    (found,) = Register(folder / "spent.jsonl").totals()
    return found


def test_a_run_counts_once_and_a_second_one_is_warned_and_adds_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tune(tmp_path / "first")
    tune(tmp_path / "first")  # only loaded
    assert total(tmp_path).entries == 1
    assert total(tmp_path).epsilon == first.epsilons.certified
    assert "paid before" not in caplog.text
    second = tune(tmp_path / "second", list(reversed(RECORDS)), epsilon=2)
    assert f"these records paid before (once, epsilon {first.epsilons.certified:.4g} at delta 0.001)" in caplog.text
    assert total(tmp_path).epsilon == pytest.approx(first.epsilons.certified + second.epsilons.certified)
    assert total(tmp_path).delta == 2e-3
    others = tune(tmp_path / "third", RECORDS[:-1])
    assert {one.entries for one in Register(tmp_path / "spent.jsonl").totals()} == {1, 2}
    register = (tmp_path / "spent.jsonl").read_text()
    assert others.ledger.header.run_id in register
    assert RECORDS[0]["text"] not in register
    with pytest.raises(ConfigError, match=r"search\.again.*once|search\.again.*2 times"):
        tune(tmp_path / "best", search={"space": {"learning_rate": [0.01, 0.02]}}, candidates=2)


def test_a_run_counts_before_its_first_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before anything was charged, it counts once, and with the settings that it had."""

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tuning_run, "_train", killed)
        for epsilon in (8, 8, 2):
            with pytest.raises(KeyboardInterrupt):
                tune(tmp_path / "out", epsilon=epsilon)
    assert total(tmp_path).entries == 2
    assert total(tmp_path).epsilon == pytest.approx(10, rel=0.01)
    assert tune(tmp_path / "out", epsilon=2).ledger.header.run_id in (tmp_path / "spent.jsonl").read_text()
    assert total(tmp_path).entries == 2


def test_a_run_whose_ledger_was_removed_starts_again_as_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To start over in the same folder is to spend again."""

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "charge", killed)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "out")
    (tmp_path / "out" / "ledger.jsonl").unlink()
    for path in (tmp_path / "out").glob("checkpoint*"):
        path.unlink()
    assert total(tmp_path).entries == 1
    tune(tmp_path / "out")
    assert total(tmp_path).entries == 2
    assert "paid before" in caplog.text


def test_a_killed_run_goes_on_as_the_same_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    csv = write_csv(tmp_path / "records.csv", RECORDS)

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    from dptune.corpus.reading.source import RecordSource
    from dptune.tuning.base import open_base
    from dptune.tuning.prepare import prepare
    from dptune.tuning.settings import TuneSettings

    chosen = TuneSettings(epsilon=8.0, delta=1e-3, **QUICK)
    prepared = prepare(RecordSource(str(csv), unit="customer_id"), open_base(str(checkpoint()), chosen), chosen)
    register = Register(tmp_path / "elsewhere.jsonl")
    with pytest.raises(KeyboardInterrupt):
        tuning_run.run(prepared, tmp_path / "out", register, stop)
    found = tuning_run.run(prepared, tmp_path / "out", register)
    assert register.totals()[0].entries == 1
    assert register.totals()[0].epsilon == found.epsilons.certified
    assert "paid before" not in caplog.text


def test_a_run_that_moves_its_noise_counts_as_its_whole_budget(tmp_path: Path) -> None:
    """What it will release is not known at its start: its filter lets it spend the budget."""
    public = [{"text": record["text"]} for record in rows(12, 12)]
    options = {"move_noise": True, "design": "AB"}
    tune(tmp_path / "out", mechanism="rldp", options=options, public=public)
    assert total(tmp_path).epsilon == pytest.approx(8, rel=0.01)


def test_the_command_warns_and_adds_up(tmp_path: Path) -> None:
    csv = write_csv(tmp_path / "records.csv", RECORDS)
    given = ["--data", str(csv), "--unit", "customer_id", "--epsilon", "8", "--delta", "0.001"]
    quick = ["--epochs", "2", "--batch", "8", "--rank", "2"]
    for number in (1, 2):
        command = ["tune", "--model", str(checkpoint()), *given, *quick, "--out", str(tmp_path / f"out{number}")]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        assert ("paid before" in done.stderr) is (number == 2), done.stderr
    other = str(write_csv(tmp_path / "other.csv", RECORDS[:-2]))
    command = ["tune", "--model", str(checkpoint()), *given, *quick, "--data", other, "--out", str(tmp_path / "third")]
    assert CliRunner().invoke(app, command).exit_code == 0
    shown = CliRunner().invoke(app, ["spent", str(tmp_path / "spent.jsonl")])
    assert "out1; out2" in shown.stdout  # two sets of records are called alike
    assert "third" in shown.stdout
    assert str(tmp_path) not in (tmp_path / "spent.jsonl").read_text()
    said = CliRunner().invoke(app, ["spent", str(tmp_path / "spent.jsonl"), "--json"])
    found, third = json.loads(said.stdout)["totals"]
    assert (found["entries"], found["unit"]) == (2, "customer_id")
    assert (found["folders"], third["folders"]) == (["out1", "out2"], ["third"])
    assert len(found["units"]) == 1
    assert found["epsilon"] == pytest.approx(16, rel=0.01)
