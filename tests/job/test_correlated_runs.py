"""Correlated noise in runs on own records: what is refused before anything is booked, and what is told of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint, rows, write_csv
from typer.testing import CliRunner, Result

from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.job import run
from dptune.job.base_model import open_base
from dptune.job.preparation import PreparedRun, prepare
from dptune.job.settings import TuneSettings
from dptune.records.reading.source import RecordSource

ARGUMENTS = ["--epsilon", "8", "--epochs", "2", "--expected-batch-size", "8", "--rank", "2"]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", "--model", str(checkpoint()), *arguments])


def prepared(records: list[dict[str, Any]], **settings: Any) -> PreparedRun:
    chosen = TuneSettings(**{"epsilon": 8.0, **QUICK, **settings})
    return prepare(RecordSource(records, unit="customer_id"), open_base(str(checkpoint()), chosen), chosen)


def test_bands_are_refused_by_the_sample_rate_of_the_run_alone() -> None:
    many = {"mechanism": "banded", "options": {"bands": 16}}
    found = prepared(rows(60, customers=60), expected_batch_size=2, **many)
    assert found.mechanism.mechanism.bands == 16
    assert found.mechanism.mechanism.group_sample_rate(found.schedule.sample_rate) < 1
    with pytest.raises(ConfigError, match=r"16 at sample rate 0\.14.* with chance 2\..*use at most 7"):
        prepared(rows(60, customers=60), expected_batch_size=8, epochs=4, **many)


def test_past_noise_that_does_not_fit_is_refused_by_a_dry_run_and_before_the_run_is_booked(tmp_path: Path) -> None:
    data = ["--data", str(write_csv(tmp_path / "a.csv", rows(60))), *ARGUMENTS, "--out", str(tmp_path / "out")]
    given = ["--mechanism", "banded", "--set", "bands=4", "--set", "noise_memory=1e-9"]
    for dry in (["--dry-run"], []):
        done = command(*data, *given, *dry)
        assert done.exit_code == 2
        assert "noise_memory: 4 bands keep" in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "spent.jsonl").exists()
    assert not (tmp_path / "out" / "ledger.jsonl").exists()


def test_where_bands_are_open_memory_bounds_them(caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for memory in (2.0, 1e-9):
        options = {"bands": "auto", "noise_memory": memory}
        found[memory] = prepared(
            rows(400), expected_batch_size=2, epochs=1, epsilon=8.0, mechanism="banded", options=options
        )
    assert found[2.0].mechanism.mechanism.bands > 1
    assert "allow bands up to 1" in caplog.text
    assert found[1e-9].mechanism.mechanism.bands == 1


@pytest.mark.parametrize("bands", [1, 2])
def test_what_became_of_correlated_noise_is_told(bands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes on with noise that begins anew."""
    given = ["--data", str(write_csv(tmp_path / "a.csv", rows(60))), *ARGUMENTS, "--out", str(tmp_path / "out")]
    given += ["--mechanism", "banded", "--set", f"bands={bands}"]
    original, made = run.train, []

    def stopped(spec: Any, folder: Path, entropy: Any, _: Any, **more: Any) -> Any:
        def on_step(report: Any) -> None:
            made.append(report)
            if len(made) == 5:
                raise KeyboardInterrupt

        return original(spec, folder, entropy, on_step, **more)

    monkeypatch.setattr(run, "train", stopped)
    assert command(*given).exit_code == 130
    monkeypatch.setattr(run, "train", original)
    done = command(*given)
    assert done.exit_code == 0, done.output
    assert ("Correlated noise began anew once" in done.stdout) is (bands == 2)
    assert ("With one band this is ordinary, independent noise." in done.stdout) is (bands == 1)
    figures = json.loads(command(*given, "--json").stdout)
    assert figures.get("restarts") == (1 if bands == 2 else None)


def test_an_option_that_changed_is_named_by_itself(tmp_path: Path) -> None:
    given = ["--data", str(write_csv(tmp_path / "a.csv", rows(60))), *ARGUMENTS, "--out", str(tmp_path / "out")]
    given += ["--mechanism", "banded"]
    assert command(*given, "--set", "bands=2").exit_code == 0
    other = command(*given, "--set", "objective=last", "--set", "bands=1")
    assert other.exit_code == 2
    told = "--set bands: 2 then, 1 now; --set objective: not given then, last now"
    assert told in " ".join(other.stderr.split())
