"""The registry has the cells with a guarantee and no others, each once, and names the one to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import result

from tasks.mlflow import tracking
from tasks.mlflow.registry import ALIAS, register


@pytest.fixture
def study(empty: Path) -> tuple[str, list[dict[str, Any]], list[Path]]:
    """The parent run, results and folders of cells whose models MLflow has. As for a user, no variable names MLflow."""
    Path("data").mkdir()
    parent = tracking.parent_run("mine", {})
    results = [
        result("static", adapter_sha256="a" * 64),
        result("quantile", 4.0),
        result("rldp_published", "inf"),
        result("auto_s", telemetry="private"),
    ]
    return parent, results, [logged(parent, empty / str(one["mechanism"])) for one in results]


def logged(parent: str, folder: Path) -> Path:
    client = tracking.client()
    experiment = client.get_run(parent).info.experiment_id
    run = client.create_run(experiment).info.run_id
    model = client.create_logged_model(experiment, name=folder.name, source_run_id=run)
    client.finalize_logged_model(model.model_id, "READY")
    folder.mkdir()
    (folder / "mlflow_run").write_text(run)
    return folder


def test_certified_cells_are_versions_once_and_the_alias_follows_the_report(
    study: tuple[str, list[dict[str, Any]], list[Path]],
) -> None:
    parent, results, folders = study
    client = tracking.client()
    for best in ("small.static.seed0", "small.quantile.seed0"):
        register(parent, "my/study", results, folders, best)
        versions = client.search_model_versions("name = 'dptune-my_study'")
        assert sorted(one.tags["mechanism"] for one in versions) == ["quantile", "static"]
        assert client.get_model_version_by_alias("dptune-my_study", ALIAS).tags["cell"] == best
    (static,) = (one for one in versions if one.tags["mechanism"] == "static")
    assert static.run_id == (folders[0] / "mlflow_run").read_text()
    assert {"epsilon_certified": "2", "delta": "1e-05", "unit": "record"}.items() <= static.tags.items()
    assert static.tags["adapter_sha256"] == "a" * 64


def test_without_a_guarantee_there_is_no_model(study: tuple[str, list[dict[str, Any]], list[Path]]) -> None:
    parent, results, folders = study
    register(parent, "open", results[2:], folders[2:], "small.rldp_published.seed0")
    assert tracking.client().search_registered_models() == []
    register(tracking.LATER, "open", results, folders, "small.static.seed0")
    assert tracking.client().search_registered_models() == []
