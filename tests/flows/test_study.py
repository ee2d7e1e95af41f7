"""The study flow: its parts in order, from a form with other values than the file's, to a new report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import BUDGET, ROOT, read_json, static, write_params

from dptune.core.files import write_text
from flows.common.command import FlowError
from flows.common.form import changes, file_values, folder_of
from flows.deployments import audit_form, experiment_form, fields_of, study_form
from flows.experiment import ALL_STAGES, DATA_STAGES
from flows.study import study
from tasks.experiment.cell_list import write_list
from tasks.experiment.finetune import run_cell
from tasks.mlflow import tracking
from tasks.paths import AUDITED, DATA, EXPERIMENT, REPORT, REPORTS, RUNS
from tasks.settings.params import load_settings

pytestmark = pytest.mark.system

QUICK = {
    "experiment": {"mechanisms": ["static"]},
    "training": {"max_length": 400},
    "audit": {"generations": 20, "candidates": 3, "records": 8, "step_trials": 0},
}
HELD: dict[str, Any] = {"accounting": "certified", "telemetry": "research", "delta": 1e-5}
# Stands for DVC: the data is there already.
_DVC = """
import pathlib, sys
pathlib.Path("asked").write_text(" ".join(sys.argv[1:]))
print("Stage 'checks' didn't change, skipping\\nRunning stage 'pretrain':", flush=True)
if pathlib.Path("refused").exists():
    print("error: data.path: is missing. Fix: give one.\\nERROR: failed to reproduce 'acquire'", flush=True)
    sys.exit(255)
"""


@pytest.fixture
def checkout(server: str, pipeline: Path) -> Iterator[Path]:
    """A pipeline whose one cell is finished, and whose DVC is a stand-in."""
    write_text(Path("dvc/__main__.py"), _DVC)
    write_text(Path("dvc/__init__.py"), "")
    cell = static(QUICK)
    write_text(cell.directory / "cell.json", cell.model_dump_json())
    run_cell(cell, "cpu", tracking.parent_run("renamed", {}))
    yield pipeline
    sys.modules.pop("dvc", None)


def artifacts(kind: str) -> list[Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [one for one in client.read_artifacts() if one.type == kind]


def test_a_study_from_a_form_ends_with_a_new_report_and_leaves_the_file_alone(checkout: Path) -> None:
    form = {"mechanisms": ["static"], "epsilons": [BUDGET], "seeds": [0], "epochs": 0.35, "overrides": {}, **HELD}
    before = Path("params.yaml").read_bytes()
    write_text(REPORT / "report.html", "the workspace's own")
    write_text(EXPERIMENT, "{}")
    state = study_form(name="renamed", **form, return_state=True)
    assert state.is_completed(), state.message
    assert Path("asked").read_text() == f"repro {' '.join(DATA_STAGES)}"
    (own,) = REPORTS.iterdir()
    assert own.name.startswith(f"renamed-static-at-epsilon-{BUDGET:g}-1-seed-")
    page = (own / "report" / "report.html").read_text()
    assert "<title>dptune report: renamed</title>" in page
    assert read_json(own / "experiment.json")["name"] == "renamed"
    assert (REPORT / "report.html").read_text() == "the workspace's own"
    assert EXPERIMENT.read_text() == "{}", "otherwise make repro would run again"
    assert f'href="../reports/{own.name}/report/report.html"' in (REPORT / "index.html").read_text()
    assert 'href="../../../report/index.html"' in page
    assert Path("params.yaml").read_bytes() == before
    (results,) = [one for one in artifacts("markdown") if one.description == "The cells of renamed"]
    assert "| `static` | " in results.data
    assert "ε published | ε noise only | ε certified | ε audited" in results.data
    assert str((own / "report" / "report.html").resolve()) in results.data
    assert "artifacts/report/report.html" in results.data, "MLflow's"
    done = [(one.key, one.data, one.description) for one in artifacts("progress")]  # those of other tests are there too
    assert ("study", 100.0, "done") in done
    assert ("cells", 100.0, "1 of 1 cells") in done
    assert ("audits", 100.0, "1 of 1 audits") in done


def test_a_study_has_the_workspaces_report_only_with_the_files_own_values(pipeline: Path) -> None:
    write_params(QUICK)
    given = file_values("study", fields_of("study"), load_settings())

    def folder(**other: Any) -> Path:
        return folder_of(changes("study", given | other))

    assert folder() == folder(overrides={"search": {"epsilon": 3}}) == DATA
    names = [folder(name="x" * 200), folder(name="Größe 大大" * 25), folder(epochs=0.5), folder(seeds=[1])]
    names.append(folder(overrides={"audit": {"generations": 21}}))
    assert len({*names}) == len(names), "other values have another folder"
    assert folder(epochs=0.5) == folder(epochs=0.5), "a scheduled run finds its own again"
    for name in names:
        name.mkdir()
        assert name.parent == REPORTS


def test_cells_and_audits_alone_leave_the_workspaces_lists_alone_with_other_values(checkout: Path) -> None:
    grid = {"name": "renamed", "mechanisms": ["static"], "epsilons": [BUDGET], "seeds": [0], "epochs": 0.35, **HELD}
    assert experiment_form(**grid, runner="threads", overrides={}, return_state=True).is_completed()
    assert not EXPERIMENT.exists()
    (own,) = REPORTS.iterdir()
    (name,) = read_json(own / "experiment.json")["cells"]
    write_list(EXPERIMENT, "mine", [RUNS / name])
    before = EXPERIMENT.read_text()
    attacks = {"records": 8, "shadows": 0, "step_trials": 0, "seed": 0, "overrides": {"audit": {"candidates": 3}}}
    assert audit_form(generations=21, **attacks, return_state=True).is_completed()
    assert not AUDITED.exists()
    assert EXPERIMENT.read_text() == before
    (audited,) = {*REPORTS.iterdir()} - {own}
    assert list(read_json(audited / "audited.json")) == [name], "the workspace's own cells"


def test_a_stage_that_fails_ends_the_study_with_its_sentence(checkout: Path) -> None:
    Path("refused").touch()
    with pytest.raises(FlowError, match="the data could not be made") as caught:
        study()
    assert caught.value.cause == "data.path: is missing. Fix: give one."
    assert not EXPERIMENT.exists()


def test_dvc_makes_all_that_the_experiment_reads() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    made = {
        out: name
        for name, stage in stages.items()
        for one in stage["outs"]
        for out in ([one] if isinstance(one, str) else one)
    }
    needed = {made[path] for path in stages["experiment"]["deps"] if path in made}
    assert needed == set(DATA_STAGES)
    before = set(needed)
    while more := {made[path] for name in before for path in stages[name]["deps"] if path in made} - before:
        before |= more
    assert before == set(ALL_STAGES), "the share that is done counts them"


def test_a_study_without_a_file_says_so(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_params()
    Path("params.yaml").unlink()
    state = study_form(
        name="x", mechanisms=["static"], epsilons=[1], seeds=[0], epochs=1, overrides={}, **HELD, return_state=True
    )
    assert state.is_failed()
    assert "params.yaml" in str(state.message)
