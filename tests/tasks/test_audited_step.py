"""The step that the audit stage attacks is the one that the ledger was charged for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import static

from dptune.core.files import write_text
from dptune.privacy.ledger_file import read_ledger
from tasks.audit import mechanism_attacks as module
from tasks.audit.attacks import audit_cell
from tasks.experiment.finetune import run_cell
from tasks.settings.experiment import Audit


def test_the_audited_step_has_the_noise_of_the_ledger(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more noise the attack would find less than the run's own step shows, whatever is wrong with it."""
    cell = static()
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu")
    attacked: list[Any] = []
    real = module.audit_step

    def noted(mechanism: Any, **options: Any) -> Any:
        attacked.append(mechanism)
        return real(mechanism, **options)

    monkeypatch.setattr(module, "audit_step", noted)
    options = {"generations": 1, "candidates": 1, "records": 0, "shadows": 0, "step_trials": 500, "seed": 0}
    step = audit_cell(cell.directory, Audit(confidence=0.95, false_alarms=0.001, **options), "cpu")["step"]
    (charged,) = read_ledger(cell.directory / "ledger.jsonl").composition
    for mechanism in attacked:
        release = mechanism.release(mechanism.knobs(), 1.0)
        assert release.effective_noise_multiplier == charged.effective_noise_multiplier
    assert len(attacked) >= 1
    assert step["mu_certified"] == pytest.approx(1 / charged.effective_noise_multiplier)
