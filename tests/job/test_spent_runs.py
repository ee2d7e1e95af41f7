"""Runs of ``dptune tune`` enter the register, from their start and once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError, DptuneError
from dptune.job import run as tuning_run
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.spent_budgets import booking
from dptune.privacy.spent_budgets.register import Register, SpentTotal
from dptune.training.run import StepReport

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


def killed(monkeypatch: pytest.MonkeyPatch, folder: Path, place: Any, name: str, when: str, call: int = 1) -> None:
    """Tune until a function is called for the n-th time, and leave what is on the disk before or after it."""
    real, kept = getattr(place, name), folder / "kept"
    calls = []

    def die(*given: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) < call:
            return real(*given, **named)
        if when == "after":
            real(*given, **named)
        shutil.copytree(folder / "runs", kept)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(place, name, die)
        with pytest.raises(KeyboardInterrupt):
            tune(folder / "runs" / "out")
    shutil.rmtree(folder / "runs")  # what an exception tidies up stays where a process is killed
    kept.rename(folder / "runs")


@pytest.mark.parametrize(
    ("place", "name", "when", "call", "booked"),
    [
        (booking, "write_booking", "before", 1, 0),
        (Register, "add_run", "before", 1, 0),
        (Register, "add_run", "after", 1, 1),
        (Ledger, "_put", "before", 2, 1),
        (Ledger, "_put", "after", 2, 1),
        (booking, "write_json", "before", 2, 1),
        (booking, "write_json", "after", 2, 1),
        (Ledger, "charge", "before", 1, 1),
        (Ledger, "charge", "after", 1, 1),
    ],
)
def test_a_run_that_is_killed_as_it_begins_counts_once(
    place: Any, name: str, when: str, call: int, booked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment on in which its ledger begins, however often it is killed there and goes on."""
    runs = tmp_path / "runs"
    for _ in range(2):
        killed(monkeypatch, tmp_path, place, name, when, call)
        assert len(Register(runs / "spent.jsonl")._read()[0]) == booked
        assert booked or not RunFolder(runs / "out").has_begun, "its line comes first"
        if name == "write_json" or (name, when) == ("charge", "after"):
            break  # the ledger has begun: the next process does not come there again
    done = tune(runs / "out")
    assert [one["id"] for one in Register(runs / "spent.jsonl")._read()[0]] == [done.ledger.header.run_id]
    assert total(runs).epsilon == done.epsilons.certified
    assert Register(runs / "spent.jsonl").faults() == []


def test_a_run_of_other_settings_is_another_one_though_the_first_was_killed_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(monkeypatch, tmp_path, Ledger, "_put", "before", 2)
    done = tune(tmp_path / "runs" / "out", epsilon=2)
    assert total(tmp_path / "runs").entries == 2
    assert total(tmp_path / "runs").epsilon == pytest.approx(10, rel=0.01)
    assert done.ledger.header.run_id in (tmp_path / "runs" / "spent.jsonl").read_text()


def test_a_full_disk_at_the_first_line_of_a_ledger_books_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, line: bytes) -> int:
        if line.startswith(b'{"accounting"'):
            raise OSError(28, "No space left on device")
        return write(descriptor, line)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for _ in range(3):
            with pytest.raises(DptuneError, match=r"ledger\.jsonl: cannot be written \(No space left on device\)"):
                tune(tmp_path / "out")
    assert not (tmp_path / "spent.jsonl").exists()
    assert not (tmp_path / "out" / "ledger.jsonl").exists()
    tune(tmp_path / "out")
    assert total(tmp_path).entries == 1


def test_a_register_that_cannot_be_written_begins_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "spent.jsonl").mkdir()
    with pytest.raises((DptuneError, OSError)):
        tune(tmp_path / "out")
    assert not (tmp_path / "out" / "ledger.jsonl").exists()
    (tmp_path / "spent.jsonl").rmdir()
    assert tune(tmp_path / "out").ledger.complete


def test_a_run_whose_line_was_cut_off_counts_again_when_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = tune(tmp_path / "first")
    (tmp_path / "spent.jsonl").unlink()
    tune(tmp_path / "second")
    assert "1 of them by ledgers that the register does not name" in caplog.text
    assert f"{tmp_path / 'spent.jsonl'} is missing: no line names what lies in first" in caplog.text
    assert total(tmp_path).entries == 2
    caplog.clear()
    assert tune(tmp_path / "first").ledger.chain == first.ledger.chain
    tune(tmp_path / "second")
    assert "does not name" not in caplog.text
    assert Register(tmp_path / "spent.jsonl").faults() == []
    assert total(tmp_path).entries == 2


def test_a_ledger_that_was_lost_for_a_while_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try without it is refused, and draws an id for a run that never was."""
    killed(monkeypatch, tmp_path, Ledger, "charge", "after")
    runs = tmp_path / "runs"
    ledger = (runs / "out" / "ledger.jsonl").read_bytes()
    (runs / "out" / "ledger.jsonl").unlink()
    for _ in range(2):
        with pytest.raises(DptuneError, match="has no ledger beside it"):
            tune(runs / "out")
    (runs / "out" / "ledger.jsonl").write_bytes(ledger)
    done = tune(runs / "out")
    assert [one["id"] for one in Register(runs / "spent.jsonl")._read()[0]] == [done.ledger.header.run_id]
    (runs / "out" / "cell.json").unlink()
    tune(runs / "out")
    assert len(Register(runs / "spent.jsonl")._read()[0]) == 1, "its settings are gone, its ledger is not"


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


def test_a_run_that_was_delivered_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ledger lost lines, be it the last one alone: what it would release once more was not asked for."""
    tune(tmp_path / "out")
    path = RunFolder(tmp_path / "out").ledger
    lines = path.read_bytes().splitlines(keepends=True)

    def train(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(tuning_run, "_train", train)
    for kept in (1, len(lines) // 2, len(lines) - 1):
        path.write_bytes(cut := b"".join(lines[:kept]))
        with pytest.raises(LedgerError, match=r"is not the whole ledger of the run.*Fix: restore it"):
            tune(tmp_path / "out")
        assert path.read_bytes() == cut
    shutil.copy(RunFolder(tmp_path / "out").adapter / "ledger.jsonl", path)
    assert tune(tmp_path / "out").ledger.complete
    assert total(tmp_path).entries == 1


def test_a_killed_run_goes_on_as_the_same_entry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    csv = write_csv(tmp_path / "records.csv", RECORDS)

    def stop(report: StepReport) -> None:
        raise KeyboardInterrupt

    from dptune.job.base_model import open_base
    from dptune.job.preparation import prepare
    from dptune.job.settings import TuneSettings
    from dptune.records.reading.source import RecordSource

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
    quick = ["--epochs", "2", "--expected-batch-size", "8", "--rank", "2"]
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
