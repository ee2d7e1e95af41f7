"""The first lines of `make repro` say what comes and how long it takes here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from flows.repro import opening, took
from tasks.profile import read_profile
from tasks.settings.params import load_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the shipped params.yaml."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "params.yaml"


def test_the_shipped_study_has_a_measured_time_and_another_has_none(shipped: Path) -> None:
    text = "\n".join(opening(Path("none.log")))
    assert "rldp_published" in text
    assert "at certified epsilon 2 (static: 1, 2, 4, 8), 1 seed, on small" in text
    assert "data/report/report.html" in text
    assert "10 to 12 minutes on two idle cores" in text
    assert "profiles/price-of-privacy.yaml draws what privacy costs with three seeds" in text
    profile = load_settings(overrides=read_profile(ROOT / "profiles/price-of-privacy.yaml")).experiment
    assert (profile.epsilons, profile.seeds) == ((1, 2, 4, 8), (0, 1, 2))
    changed = yaml.safe_load(shipped.read_text())
    changed["experiment"]["seeds"] = [0, 1]
    shipped.write_text(yaml.safe_dump(changed))
    text = "\n".join(opening(Path("none.log")))
    assert "not been measured" in text
    assert "minutes" not in text
    assert "PROFILE" not in text


def test_the_last_run_here_says_how_long_it_took(tmp_path: Path) -> None:
    log = tmp_path / "repro.log"
    log.write_text("Running stage 'a':\n> x\nStage 'b' didn't change\nRunning stage 'c':\n" + took(754.4))
    assert "the last run here took 12.6 minutes for 2 stages" in opening(log)[3]
    log.write_text("Running stage 'a':\nkilled")
    assert "the last run" not in opening(log)[3]


def test_settings_that_cannot_be_read_are_left_to_the_first_stage(shipped: Path) -> None:
    shipped.write_text("experiment: 3\n")
    assert opening(Path("none.log")) == []
