"""MLflow's experiments: names that tell a reader something, and files that are found after a checkout has moved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts

from tasks.mlflow import tracking
from tasks.mlflow.experiments import SHOWN_NAMES, repair_paths


def experiment_of(parent: str) -> str:
    client = tracking.client()
    return str(client.get_experiment(client.get_run(parent).info.experiment_id).name)


def test_the_default_study_has_a_name_in_mlflow_and_keeps_its_earlier_runs(empty: Path) -> None:
    Path("data").mkdir()
    client = MlflowClient(tracking.tracking_uri())
    earlier = client.create_experiment("default")
    parent = tracking.parent_run("default", {})
    assert experiment_of(parent) == SHOWN_NAMES["default"] == "dptune: default study"
    assert client.get_run(parent).info.experiment_id == earlier
    assert tracking.parent_run("default", {}) == parent
    assert experiment_of(tracking.parent_run("mine", {})) == "mine"


def moved(target: Path) -> str:
    """The run of a checkout with a registered model, which then moved to ``target``."""
    run = tracking.parent_run("100%_of it", {})
    client = tracking.client()
    Path("model").mkdir()
    Path("model/note.txt").write_text("a file")
    client.log_artifact(run, "model/note.txt")
    model = client.create_logged_model(client.get_run(run).info.experiment_id, name="one", source_run_id=run)
    client.log_model_artifacts(model.model_id, "model")
    client.finalize_logged_model(model.model_id, "READY")
    client.create_registered_model("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", tracking.tracking_uri())
        client.create_model_version("study", f"models:/{model.model_id}", run, model_id=model.model_id)
    shutil.move(Path("data"), target / "data")
    return run


def test_mlflows_columns_name_the_source_and_its_commit(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"mlflow.source.name": "dptune", "mlflow.source.type": "LOCAL"}
    for commit, named in (("0a1b+changes", {"mlflow.source.git.commit": "0a1b"}), ("none", {})):
        monkeypatch.setattr(tracking, "git_commit", lambda commit=commit: commit)
        tags = tracking.client().get_run(tracking.parent_run(f"study {commit}", {})).data.tags
        assert {key: value for key, value in tags.items() if key.startswith("mlflow.source.")} == expected | named


def test_a_moved_checkout_finds_its_files_and_a_copy_takes_none(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "before 50%_").mkdir()
    (empty / "after").mkdir()
    monkeypatch.chdir(empty / "before 50%_")
    Path("data").mkdir()
    run = moved(empty / "after")
    monkeypatch.chdir(empty / "after")
    for _ in range(2):
        assert tracking.parent_run("100%_of it", {}) == run
        uri = tracking.tracking_uri()
        model = tracking.client().get_model_version_download_uri("study", "1")
        for address in (f"runs:/{run}/note.txt", f"{model}/note.txt"):
            assert Path(download_artifacts(address, tracking_uri=uri)).read_text() == "a file"
        assert str(empty / "after") in tracking.client().get_run(run).info.artifact_uri
    shutil.copytree(empty / "after", empty / "copy")
    monkeypatch.chdir(empty / "copy")
    repair_paths()
    assert str(empty / "after") in tracking.client().get_run(run).info.artifact_uri, "the files are still there"


def test_a_database_that_is_no_database_stops_nothing(empty: Path, caplog: pytest.LogCaptureFixture) -> None:
    repair_paths()
    Path("data").mkdir()
    Path("data/mlflow.db").write_text("not a database, but longer than its header would be" * 40)
    repair_paths()
    assert "MLflow's pages may miss files: data/mlflow.db" in caplog.text
