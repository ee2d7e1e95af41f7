"""The audit flow: every cell once, again only after a change, and a violation fails it with its sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import read_json, static
from work_here import work_of

from dptune.core.errors import DataError
from dptune.core.files import locked, private_directory, write_json, write_text
from flows import audit as module
from flows.audit import audit
from flows.common import processes
from flows.common.command import FlowError
from tasks.audit import audit_plan as plans
from tasks.audit.attacks import audit_file
from tasks.experiment.finetune import run_cell
from tasks.metrics import legible
from tasks.mlflow import tracking
from tasks.paths import EXPERIMENT, RUNS

pytestmark = pytest.mark.system

QUICK = {"training": {"max_length": 400}, "audit": {"generations": 20, "candidates": 3, "records": 8, "step_trials": 0}}


@pytest.fixture
def finished(server: str, pipeline: Path) -> Path:
    """The folder of the one cell that the experiment lists, with its run in MLflow."""
    cell = static(QUICK)
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu", tracking.parent_run("tiny", {}))
    write_json(EXPERIMENT, {"name": "tiny", "cells": [cell.directory.name]})
    return cell.directory


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Audits in this process, and a patch for what they do."""
    monkeypatch.setattr(processes, "run_process", lambda _label, command, **_: work_of(command))
    return monkeypatch


def test_each_cell_is_attacked_once_and_mlflow_has_it(finished: Path, here: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    real = plans.audit_cell

    def counted(directory: Path, *others: Any) -> dict[str, Any]:
        made.append(directory)
        return real(directory, *others)

    here.setattr(plans, "audit_cell", counted)
    assert audit() == audit() == [str(audit_file(finished))]
    assert made == [finished]
    run = tracking.client().get_run((finished / "mlflow_run").read_text())
    found = read_json(audit_file(finished))
    assert run.data.metrics["epsilon/audited"] == legible("epsilon_audited", found["one_run"]["epsilon_audited"])
    assert run.data.metrics["audit/canaries_calibrated_auc"] == found["canaries"]["calibrated"]["auc"]
    assert run.info.status == "FINISHED"
    names = {file.path for file in tracking.client().list_artifacts(run.info.run_id)}
    assert "audit.json" in names
    audit(overrides={"audit": {"seed": 1}})
    assert made == [finished, finished]
    history = tracking.client().get_metric_history(run.info.run_id, "epsilon/audited")
    assert [metric.step for metric in history] == [0, 1]  # the last audit is what MLflow shows
    audit_file(finished).unlink()
    audit(overrides={"audit": {"seed": 1}})
    assert audit_file(finished).exists()


def test_cells_that_differ_by_their_seed_share_the_confidence(finished: Path, here: pytest.MonkeyPatch) -> None:
    seeds: dict[str, int] = {}

    def noted(directory: Path, *others: Any) -> None:
        assert directory.name not in seeds, "two processes share the cells"
        seeds[directory.name] = others[-1]
        write_json(audit_file(directory), {"violations": []})

    here.setattr(plans, "audit_cell", noted)
    here.setattr(module, "publish_audit", lambda *_: None)
    names = {"a.static.eps2.seed0-1": 2, "a.static.eps2.seed10-2": 2, "a.static.eps8.seed0-3": 1, "a.other.seed0-4": 1}
    write_json(EXPERIMENT, {"name": "tiny", "cells": list(names)})
    audit()
    assert seeds == names


def test_a_violation_fails_the_flow_with_its_sentence(finished: Path, here: pytest.MonkeyPatch) -> None:
    sentence = "small.static: an attack shows epsilon >= 9 at confidence 0.95, but its ledger certifies 2"
    here.setattr(plans, "audit_cell", lambda cell, *_: write_json(audit_file(cell), {"violations": [sentence]}))
    here.setattr(module, "publish_audit", lambda *_: None)
    with pytest.raises(FlowError, match="certifies 2") as found:
        audit()
    assert found.value.status == 1
    assert found.value.cause.startswith(f"{sentence}. Fix: trust no epsilon of this run: ")


def test_a_run_without_its_ledger_fails_the_flow(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "ledger.jsonl").unlink()
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: .*ledger\.jsonl: is missing: an adapter without its ledger has no epsilon .*Fix: ", last)


def test_a_cell_that_fails_keeps_no_other_from_its_audit(finished: Path, here: pytest.MonkeyPatch) -> None:
    names = [finished.name, "b.static.eps2.seed0-1", "c.static.eps2.seed0-2"]
    write_json(EXPERIMENT, {"name": "tiny", "cells": names})

    def second_fails(directory: Path, *_: Any) -> None:
        if directory.name == names[1]:
            raise DataError("is missing", fix="restore it", file=directory)
        write_json(audit_file(directory), {"violations": []})

    here.setattr(plans, "audit_cell", second_fails)
    here.setattr(module, "publish_audit", lambda *_: None)
    with pytest.raises(FlowError, match=rf"^{names[1]} could not be audited$") as found:
        audit()
    assert (found.value.status, "is missing. Fix: restore it." in found.value.cause) == (2, True)
    assert [audit_file(RUNS / name).exists() for name in names] == [True, False, True]


def test_two_flows_never_audit_one_cell_at_a_time(finished: Path, here: pytest.MonkeyPatch) -> None:
    folder = private_directory(audit_file(finished).parent)
    with locked(folder / "lock"), pytest.raises(FlowError) as found:
        audit()
    assert found.value.cause == "data/audits: another process audits there. Fix: wait for its end, and run again."
    assert not audit_file(finished).exists()


def test_without_an_experiment_it_says_so(server: str, pipeline: Path) -> None:
    with pytest.raises(DataError, match=r"experiment\.json: is missing.* Fix: run the experiment stage again"):
        audit()
