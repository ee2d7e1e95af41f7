"""The policy flow: every run once, a page, and MLflow's curves and ledgers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_pipeline import ROOT, SWIM, params, prepare_environment, read_json

from dptune.core.errors import ConfigError
from flows import policy as module
from flows.policy import policy
from tasks.mlflow import tracking
from tasks.paths import POLICY, PUBLIC_NARRATIVES, SPLITS
from tasks.policy.rlhf import cells
from tasks.policy.tenants import TENANTS
from tasks.settings.params import load_settings
from tasks.settings.policy import rlhf_of, tenants_of

pytestmark = pytest.mark.system

QUICK: dict[str, Any] = {
    "policy": {
        "name": "tiny-policy",
        "seeds": [0],
        "audit_trials": 0,
        "studies": {
            "swim": SWIM | {"runs": {"l2": {"algorithm": "l2", "epsilon": 3}}},
        },
    }
}


SPANS = {"noise_multiplier": 1, "continuing": True, "steps": 3}


def _write(runs: dict[str, Any]) -> None:
    study = {**QUICK["policy"]["studies"]["swim"], "runs": runs}
    content = params() | {"policy": {"delta": 1e-5, "processes": 2, **QUICK["policy"], "studies": {"swim": study}}}
    Path("params.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def test_runs_are_made_once_and_told_to_mlflow(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(module.run_one, "retries", 0)  # the same error twice shows nothing more
    runs = QUICK["policy"]["studies"]["swim"]["runs"]
    _write(runs | {"spans": SPANS})
    with pytest.raises(SystemExit) as ended:  # a failed run is named, after all others
        module.main()
    assert ended.value.code == 2
    summary, last = capsys.readouterr().err.splitlines()[-2:]
    assert summary == "1 of 2 runs failed: swim.spans.seed0"
    assert re.fullmatch(r"error: user \d is in a second update, .* Fix: reset the environment .*", last)
    folders = {path.name.rsplit("-", 1)[0]: path for path in (POLICY / "runs").iterdir()}
    assert {name for name, path in folders.items() if (path / "result.json").exists()} == {"swim.l2.seed0"}
    made = {
        path: path.stat().st_mtime_ns
        for path in (POLICY / "runs").rglob("*")
        if path.name in ("job.json", "result.json")
    }

    _write(runs)
    page = Path(policy())
    assert made == {path: path.stat().st_mtime_ns for path in made}
    assert "SIMULATED users" in page.read_text()
    mine = folders["swim.l2.seed0"]
    assert read_json(mine / "result.json")["epsilon_certified"] == pytest.approx(3, rel=1e-3)
    run_id = (mine / "mlflow_run").read_text()
    client = tracking.client()
    assert [point.step for point in client.get_metric_history(run_id, "mean_return")][:2] == [2, 4]
    run = client.get_run(run_id)
    assert run.data.metrics["epsilon/certified"] == pytest.approx(3, rel=1e-3)
    assert run.data.params["critic"] == "private"
    assert "ledger.jsonl" in {item.path for item in client.list_artifacts(run_id)}
    _tenants_and_language_models_are_told_too(client.get_run(run_id).info.experiment_id)


def _tenants_and_language_models_are_told_too(experiment: str) -> None:
    chosen = load_settings(ROOT / "params.yaml").policy
    point = {"updates": 2, "reward": 0.1, "score": 0.2, "kl": 0.3}
    models = [{"data": "synthetic", "epsilon_certified": 3.0, "curve": [point]} for _ in cells(chosen.rlhf)]
    line = {"label": "A+B", "public_perplexity": 2.5}
    found = {"data": "synthetic", "settings": {"tenants": 4}, "epsilon_tenant": 0.9, "summary": [line]}
    for path in (PUBLIC_NARRATIVES, SPLITS / "train.parquet", SPLITS / "attack.parquet"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")  # what a cell's folder is named after
    for directory in (TENANTS, *(cell.directory for cell in cells(chosen.rlhf))):
        directory.mkdir(parents=True)
    parent = tracking.parent_run("tiny-policy", {})
    module.publish_others(chosen, {"rlhf": models, "tenants": found}, parent)
    runs = {run.info.run_name: run.data.metrics for run in tracking.client().search_runs([experiment])}
    assert runs["tenants"] == {"epsilon/tenant": 0.9, "perplexity/public.A_B": 2.5}
    assert runs["rlhf.K32.eps3.seed0"] == {"reward": 0.1, "score": 0.2, "kl": 0.3, "epsilon/certified": 3.0}


def test_language_models_and_tenants_are_parts_of_their_own() -> None:
    chosen = load_settings(ROOT / "params.yaml").policy
    found = {name: (part, section) for name, part, section in module.parts(chosen)}
    assert set(found) == {"rlhf.K32.eps3.seed0", "rlhf.K128.eps3.seed0", "tenants"}
    options = [f"{key}={json.dumps(value)}" for key, value in found["rlhf.K32.eps3.seed0"][1].items()]
    (cell,) = cells(rlhf_of(options))
    assert (cell.users, cell.epsilon, cell.label) == (32, 3.0, "K32.eps3.seed0")
    changes = [f"{key}={json.dumps(value)}" for key, value in found["tenants"][1].items()]
    assert tenants_of(changes) == chosen.tenants


def test_a_profile_with_other_records_than_dvc_makes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow would train on what lies in data/splits, and say that it was the profile's."""
    monkeypatch.chdir(tmp_path)
    _write(QUICK["policy"]["studies"]["swim"]["runs"])
    Path("other.yaml").write_text("data: {split_seed: 43}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data: other\.yaml has other records .* Fix: run `dvc exp run"):
        module.main(Path("other.yaml"))
