"""Shadow models: which bound they make, and under private telemetry that nothing private trains them or is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_pipeline import static

from dptune.core.files import write_text
from dptune.privacy.run_folder import RunFolder
from dptune.records.canaries import read_secrets
from dptune.records.parquet_file import read_records
from tasks.audit import attacks
from tasks.audit import target as target_module
from tasks.audit.attacks import audit_cell, audit_file
from tasks.audit.target import load_target
from tasks.experiment.cell_list import write_list
from tasks.experiment.finetune import run_cell
from tasks.mlflow import cell_run
from tasks.paths import EVAL, EXPERIMENT, PUBLIC_VALIDATION, REPORT, SPLITS, planted_secrets
from tasks.report.experiment import report
from tasks.settings.experiment import Audit

SHORT = {"training": {"max_length": 400, "epochs": 0.15}, "experiment": {"telemetry": "private"}}
_ENDING = 40  # characters at a record's end that tell it from others


@pytest.fixture
def finished(pipeline: Path) -> Path:
    """The folder of a finished cell under private telemetry, with a number of a run in MLflow."""
    cell = static(SHORT)
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    write_text(RunFolder(cell.directory).mlflow_run, "one")
    return cell.directory


def with_shadows(count: int) -> Audit:
    tiny = {"generations": 4, "candidates": 3, "records": 8, "step_trials": 0, "seed": 0}
    return Audit(**{"confidence": 0.95, "false_alarms": 0.001, "shadows": count} | tiny)


@pytest.mark.usefixtures("quick_pictures")
def test_private_telemetry_tells_nothing_private_of_shadow_models(
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither in a log line, in MLflow, in the audit nor on the page; they train on public records and own canaries."""
    private = [text for side in (SPLITS / "train.parquet", SPLITS / "attack.parquet", EVAL) for text in texts_of(side)]
    for side in ("train", "attack"):
        (SPLITS / f"{side}.parquet").unlink()
    trained: list[str] = []
    real = target_module.stored_tokens

    def noted(texts: list[str], *others: Any, **options: Any) -> Any:
        trained.extend(texts)
        return real(texts, *others, **options)

    sent: list[dict[str, Any]] = []

    def add(run: str, metrics: dict[str, float], artifact: Path, tags: dict[str, str], **options: Any) -> bool:
        sent.append({"metrics": metrics, "artifact": artifact.read_text(), "tags": tags, **options})
        return True

    monkeypatch.setattr(target_module, "stored_tokens", noted)
    monkeypatch.setattr(cell_run, "add_to_run", add)
    with caplog.at_level(logging.DEBUG):
        audit = audit_cell(finished, with_shadows(4), "cpu")
        cell_run.publish_audit(finished, audit_file(finished))
        write_list(EXPERIMENT, "tiny", [finished])
        report("tiny")
    candidates = read_secrets(planted_secrets()).audit
    own = {one.carrier + f" secret_id={one.secret}." for one in candidates}
    assert len(trained) > 4 * len(texts_of(PUBLIC_VALIDATION))
    assert set(trained) <= {*texts_of(PUBLIC_VALIDATION), *own}

    (message,) = sent
    assert "shadows" in audit["canaries"]
    assert not [name for name in message["metrics"] if "shadow" in name or "membership" in name]
    assert message["timed"] is False
    pages = [path.read_text("utf-8") for path in REPORT.rglob("*") if path.suffix in {".html", ".json", ".csv", ".md"}]
    assert len(pages) > 3
    told = "\n".join([caplog.text, *capfd.readouterr(), str(message), audit_file(finished).read_text(), *pages])
    assert not [text for text in private if text[-_ENDING:] in told]
    assert not [one for one in candidates if one.secret in told]


def texts_of(file: Path) -> list[str]:
    return [str(text) for text in read_records(file).text.to_pylist()]


@pytest.mark.parametrize(
    ("aligned", "count", "used"), [(True, 4, "alignment"), (False, 4, "rmia"), (False, 0, "calibrated")]
)
def test_settings_and_sizes_choose_the_score_of_the_bound(
    finished: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool, count: int, used: str
) -> None:
    """Shadow models never take the place of a score that finds more, and LiRA of few models makes no bound."""
    named = {"alignment": 1.0, "shadows": 2.0, "rmia": 3.0, "calibrated": 4.0}

    def made(*names: str) -> dict[str, Any]:
        return {name: named[name] * np.arange(20.0) for name in names}

    seen: list[Any] = []
    monkeypatch.setattr(attacks, "_can_align", lambda *_: aligned)
    monkeypatch.setattr(attacks, "_alignment", lambda *_: made("alignment")["alignment"])
    monkeypatch.setattr(attacks, "_text_scores", lambda *_: (made("calibrated"), np.zeros(20)))
    monkeypatch.setattr(attacks, "shadow_scores", lambda *_: made("shadows", "rmia"))
    monkeypatch.setattr(attacks, "one_run_figures", lambda _, scores, __: seen.append(scores) or {})
    target = load_target(finished, with_shadows(count), torch.device("cpu"), 1)
    attacks._coin_attacks(target)
    assert seen[0][1] == named[used]
