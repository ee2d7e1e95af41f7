"""Versions of parts: a run or search that was begun with another version of a part does not go on, and says which."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_search
from tiny_tuning import QUICK, checkpoint, rows

from dptune import tune
from dptune.core import settings
from dptune.core.declarations import names_nothing
from dptune.core.errors import ConfigError
from dptune.job import run
from dptune.job.run import Tuned
from dptune.job.settings import FREE, TuneSettings
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.controllers.quantile import Quantile
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.privacy import accountants, entropy
from dptune.privacy.ledger_file import read_ledger
from tasks.settings.experiment import TrainingSettings

RAISES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "loop": lambda patch: patch.setattr(settings, "VERSION", 2),
    "sampler": lambda patch: patch.setattr(entropy, "VERSION", 2),
    "accountant": lambda patch: patch.setattr(accountants, "VERSION", 2),
    "clipper flat": lambda patch: patch.setattr(Flat, "VERSION", 2),
    "noise gaussian": lambda patch: patch.setattr(Gaussian, "VERSION", 2),
    "optimizer adamw": lambda patch: patch.setitem(settings.VERSIONS, "optimizer adamw", 2),
    "average tail": lambda patch: patch.setitem(settings.VERSIONS, "average tail", 2),
}


def tuned(folder: Path) -> Tuned:
    return tune(str(checkpoint()), rows(), epsilon=8.0, delta=1e-3, out=folder / "out", **QUICK)


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was stopped after two steps. Returns its folder."""
    with monkeypatch.context() as patch:
        train = run.train

        def stopping(spec: Any, out: Path, entropy: Any, _: Any) -> Any:
            def on_step(report: Any) -> None:
                if report.releases == 2:
                    raise KeyboardInterrupt

            return train(spec, out, entropy, on_step)

        patch.setattr(run, "train", stopping)
        with pytest.raises(KeyboardInterrupt):
            tuned(folder)
    return folder / "out"


def test_a_run_goes_on_with_no_other_version_of_a_part_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = stopped(tmp_path, monkeypatch)
    for part, raise_version in RAISES.items():
        with monkeypatch.context() as patch:
            raise_version(patch)
            with pytest.raises(ConfigError) as refused:
                tuned(tmp_path)
        assert f"out: {out} was begun with another version of dptune" in str(refused.value)
        assert f"({part} 1 -> 2)" in str(refused.value)
        assert f"dptune set-aside {out}" in str(refused.value)
        assert read_ledger(out / "ledger.jsonl").releases == 2, "nothing more was charged"
    monkeypatch.setattr(Quantile, "VERSION", 2)  # a part of others
    done = tuned(tmp_path)
    assert done.ledger.complete
    monkeypatch.setattr(Flat, "VERSION", 2)
    with caplog.at_level(logging.WARNING):
        assert tuned(tmp_path).ledger == done.ledger, "it had ended: it is loaded"
    assert "(clipper flat 1 -> 2); it had ended, and is loaded as it is" in caplog.text


def test_a_run_of_before_versions_were_written_down_has_version_1_of_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stopped(tmp_path, monkeypatch)
    cell = json.loads((out / "cell.json").read_text())
    assert cell.pop("versions")["clipper flat"] == 1
    (out / "cell.json").write_text(json.dumps(cell))
    with monkeypatch.context() as patch:
        patch.setattr(Flat, "VERSION", 2)
        with pytest.raises(ConfigError, match=r"\(clipper flat 1 -> 2\)"):
            tuned(tmp_path)
    assert tuned(tmp_path).ledger.complete


def test_a_run_under_way_that_lost_what_says_how_it_began_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stopped(tmp_path, monkeypatch)
    cell, ledger = (out / "cell.json").read_bytes(), (out / "ledger.jsonl").read_bytes()
    (out / "cell.json").unlink()
    with pytest.raises(ConfigError, match=r"cell\.json is missing.*Fix: restore it, give another folder, or"):
        tuned(tmp_path)
    assert not (out / "cell.json").exists()
    assert (out / "ledger.jsonl").read_bytes() == ledger
    (out / "cell.json").write_bytes(cell)
    assert tuned(tmp_path).ledger.complete
    (out / "cell.json").unlink()
    assert tuned(tmp_path).ledger.complete, "it had ended, and releases nothing more"


def test_a_run_that_charged_nothing_begins_with_the_present_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = stopped(tmp_path, monkeypatch)
    for path in (*out.glob("ledger.jsonl"), *out.glob("checkpoint*"), *tmp_path.glob("spent.jsonl")):
        path.unlink()
    for path in out.glob("booking.json"):
        path.unlink()
    monkeypatch.setattr(Flat, "VERSION", 2)
    assert tuned(tmp_path).ledger.complete
    assert json.loads((out / "cell.json").read_text())["versions"]["clipper flat"] == 2


def test_a_search_goes_on_with_no_other_version_of_a_part_that_a_candidate_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"learning_rate": [0.001, 0.05], "optimizer": ["adamw", "sgd"]}
    tiny_search.draws(monkeypatch, 1)
    tiny_search.killed(monkeypatch, tmp_path, space=space)
    with monkeypatch.context() as patch:
        patch.setitem(settings.VERSIONS, "optimizer sgd", 2)
        with pytest.raises(ConfigError, match=r"begun with another version of dptune.*\(optimizer sgd 1 -> 2\)"):
            tiny_search.start(tmp_path, space=space)
        (cell := tmp_path / "out" / "cell.json").rename(tmp_path / "kept")
        with pytest.raises(ConfigError, match=r"begun with another version of dptune.*\(optimizer sgd 1 -> 2\)"):
            tiny_search.start(tmp_path, space=space)
        (tmp_path / "kept").rename(cell)
    monkeypatch.setitem(settings.VERSIONS, "optimizer adam_bc", 2)
    assert tiny_search.start(tmp_path, space=space).certificate is not None


def test_what_a_resumed_run_may_have_another_value_of() -> None:
    """Each of these is a promise that it moves no released number: another one needs a reason beside its field."""
    free = {"checkpoint_every", "gradient_checkpointing", "physical_batch_size"}
    assert names_nothing(TuneSettings) == {*FREE} == free | {"device"}
    assert names_nothing(TrainingSettings) == free | {"evaluate_every"}
