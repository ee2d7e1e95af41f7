"""What MLflow keeps of a cell besides figures: its adapter as a model that MLflow loads, and its data by digest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.entities import DatasetInput, Run
from tiny_pipeline import BUDGET, UNITS, built, copied, prepare_environment, static

from dptune.job.delivery.verification import CardError, check_deliverable
from dptune.records.parquet_file import read_about
from tasks.experiment import cell_training, finetune
from tasks.experiment.finetune import run_cell
from tasks.mlflow import tracking
from tasks.paths import EVAL, PUBLIC_MODEL, PUBLIC_VALIDATION, SPLITS, TRAIN

PRIVATE = {"experiment": {"telemetry": "private"}}
#: Of the cell's model.
NAME = f"small-static-eps{BUDGET:g}-seed0".replace(".", "-")


@dataclass
class Logged:
    """A cell under each telemetry, in one database. ``directory`` is the current one."""

    directory: Path
    runs: dict[str, Run]
    results: dict[str, dict[str, Any]]

    def model(self, telemetry: str, target: Path) -> Path:
        """The model's files, from where MLflow's own API finds them."""
        return Path(download_artifacts(self.uri(telemetry), dst_path=str(target)))

    def uri(self, telemetry: str) -> str:
        """The address that the run's page names."""
        run = self.runs[telemetry]
        uri = f"runs:/{run.info.run_id}/{NAME}"
        assert f'load_model("{uri}")' in run.data.tags[tracking.NOTE]
        return uri


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("logged") / "tiny pipeline")
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        patch.setattr(cell_training, "draw_curves", lambda _, path: path.write_bytes(b"picture"))
        runs, results, client = {}, {}, tracking.client()
        for telemetry, changes in (("research", {}), ("private", PRIVATE)):
            cell = static(changes)
            results[telemetry] = run_cell(
                cell, "cpu", tracking.parent_run(telemetry, {}, timed=telemetry == "research")
            )
            runs[telemetry] = client.get_run((cell.directory / "mlflow_run").read_text())
        mlflow.set_tracking_uri(tracking.tracking_uri())
        yield Logged(directory, runs, results)
        mlflow.set_tracking_uri(None)


SCORE = """
import sys, mlflow, pandas as pd
mlflow.set_tracking_uri(sys.argv[1])
texts = pd.read_parquet(sys.argv[2])["text"].tolist()
for uri, scores in zip(sys.argv[3::2], sys.argv[4::2]):
    mlflow.pyfunc.load_model(uri).predict(texts).to_csv(scores)
assert "dptune" not in sys.modules
"""


@pytest.mark.system
def test_mlflow_loads_the_models_in_a_process_without_dptune_and_they_score_as_the_runs_did(
    logged: Logged, tmp_path: Path
) -> None:
    """Perplexity from a loaded model's log-likelihoods is what the run evaluated at its end."""
    command = [tracking.tracking_uri(), str(PUBLIC_VALIDATION)]
    for telemetry in logged.runs:
        command += [logged.uri(telemetry), str(tmp_path / telemetry)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", SCORE, *command], check=True, capture_output=True, env=environment)
    for telemetry, result in logged.results.items():
        scores = pd.read_csv(tmp_path / telemetry)
        perplexity = math.exp(-scores["log_likelihood"].sum() / scores["tokens"].sum())
        assert perplexity == pytest.approx(result["after"]["public_perplexity"], rel=1e-6)
        assert abs(perplexity / result["before"]["public_perplexity"] - 1) > 1e-5, "the base alone scores like that"


def test_another_base_model_is_refused_and_the_right_one_is_found_elsewhere(logged: Logged, tmp_path: Path) -> None:
    folder = str(logged.model("research", tmp_path / "model"))
    moved = tmp_path / "base"
    shutil.copytree(PUBLIC_MODEL, moved)
    with pytest.raises(ValueError, match=r"is not a folder here\. Fix: .*model_config"):
        mlflow.pyfunc.load_model(folder, model_config={"base": str(tmp_path / "nowhere")})
    found = mlflow.pyfunc.load_model(folder, model_config={"base": str(moved)})
    assert found.predict(["A visit."])["tokens"].item() > 0
    config = moved / "generation_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ValueError, match=r"is not the one that the adapter was trained on\. Fix: "):
        mlflow.pyfunc.load_model(folder, model_config={"base": str(moved)})


def test_the_model_has_a_signature_and_holds_neither_pickles_nor_paths_of_this_machine(
    logged: Logged, tmp_path: Path
) -> None:
    folder = logged.model("research", tmp_path)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"MLmodel", "adapter_code.py", "artifacts/adapter/adapter_model.safetensors"} <= files
    assert not [name for name in files if name.endswith((".pkl", ".pt", ".bin", ".pth", ".joblib"))]
    about = yaml.safe_load((folder / "MLmodel").read_text())
    assert json.loads(about["signature"]["inputs"]) == [{"type": "string", "required": True}]
    assert [one["name"] for one in json.loads(about["signature"]["outputs"])] == ["log_likelihood", "tokens"]
    for name in files - {"artifacts/adapter/adapter_model.safetensors"}:
        text = (folder / name).read_text()
        assert str(logged.directory) not in text, name
        assert str(Path(finetune.__file__).parents[2]) not in text, name


@pytest.mark.parametrize("telemetry", ["research", "private"])
def test_the_card_states_the_guarantee_and_verify_checks_it(logged: Logged, telemetry: str, tmp_path: Path) -> None:
    adapter = logged.model(telemetry, tmp_path) / "artifacts" / "adapter"
    contents = check_deliverable(adapter)
    assert contents.epsilons.certified == logged.results[telemetry]["epsilon_certified"]
    card = (adapter / "README.md").read_text()
    assert "[More Information Needed]" not in card
    assert "held-out" not in card
    assert "- public records: " in card
    ledger = adapter / "ledger.jsonl"
    card = card.replace("epsilon_certified | ", "epsilon_certified | 0")
    (adapter / "README.md").write_text(card)
    with pytest.raises(CardError):
        check_deliverable(adapter)
    assert ledger.exists()


def test_a_research_run_has_a_logged_model_and_a_private_one_no_stamp(logged: Logged, tmp_path: Path) -> None:
    """MLflow stamps logged models with the time, so a private run's lies with the run's files."""
    client, research, private = tracking.client(), logged.runs["research"], logged.runs["private"]
    (model,) = client.search_logged_models([research.info.experiment_id])
    assert (model.name, model.status, model.source_run_id) == (NAME, "READY", research.info.run_id)
    assert [one.model_id for one in research.outputs.model_outputs] == [model.model_id]
    assert "Fine-tuned with differential privacy" in model.tags["mlflow.note.content"]
    assert client.search_logged_models([private.info.experiment_id]) == []
    assert NAME in {item.path for item in client.list_artifacts(private.info.run_id)}
    for telemetry in logged.runs:  # the folder itself holds none under either
        about = yaml.safe_load((logged.model(telemetry, tmp_path / telemetry) / "MLmodel").read_text())
        assert about["utc_time_created"] == "1970-01-01 00:00:00"


def test_a_model_has_the_figures_of_its_cell_and_the_data_that_they_were_measured_on(logged: Logged) -> None:
    run = logged.runs["research"]
    (model,) = tracking.client().search_logged_models([run.info.experiment_id])
    found = {one.key: one for one in tracking.client().get_logged_model(model.model_id).metrics}
    assert {name: one.value for name, one in found.items()}.items() <= run.data.metrics.items()
    assert {"epsilon/certified", "perplexity/eval", "perplexity/public"} <= found.keys()
    data = inputs(run)
    for name, context in (("perplexity/eval", "evaluation"), ("perplexity/public", "validation")):
        on = data[context].dataset
        assert (found[name].dataset_name, found[name].dataset_digest) == (on.name, on.digest)
    assert found["epsilon/certified"].dataset_name is None


def test_a_model_that_was_sent_is_not_sent_again(logged: Logged) -> None:
    client, run = tracking.client(), logged.runs["research"].info
    from tasks.mlflow.entities import log_model

    folder = logged.directory / "nowhere"  # it would fail if it read it
    log_model(client, run.run_id, folder, "another name", "again")
    assert len(client.search_logged_models([run.experiment_id])) == 1


def inputs(run: Run) -> dict[str, DatasetInput]:
    return {one.tags[0].value: one for one in run.inputs.dataset_inputs}


def test_inputs_name_the_data_and_hold_no_row(logged: Logged) -> None:
    found = inputs(logged.runs["research"])
    assert set(found) == {"training", "evaluation", "validation"}
    training = found["training"].dataset
    assert training.name == read_about(TRAIN)["label"]
    assert json.loads(training.profile) == {"unit": "record", "units": UNITS, "synthetic": True}
    assert json.loads(training.source) == {"uri": TRAIN.as_posix()}
    rows = [row for file in (TRAIN, EVAL) for row in pd.read_parquet(file)["text"] if row]
    told = Path("data/mlflow.db").read_bytes()
    assert len(rows) > UNITS / 2
    assert not [row for row in rows if row[:60].encode() in told]


def test_under_private_telemetry_nothing_follows_from_the_records(logged: Logged) -> None:
    """A digest of the public description: it is the same for every cohort of that description."""
    found = inputs(logged.runs["private"])
    assert set(found) == {"training", "validation"}
    about = {key: read_about(TRAIN)[key] for key in ("label", "source", "unit", "synthetic")}
    expected = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    assert found["training"].dataset.digest == expected
    assert inputs(logged.runs["research"])["training"].dataset.digest != expected


def test_no_plain_hash_of_private_records_is_in_mlflow(logged: Logged) -> None:
    """With a plain hash a guess of the records can be tested; files with the secret salt have none to be guessed."""
    places = [Path("data/mlflow.db"), *(path for path in Path("data/mlartifacts").rglob("*") if path.is_file())]
    told = b"".join(path.read_bytes() for path in places)
    private = [*SPLITS.glob("*.parquet"), *Path("data/raw").iterdir(), *Path("data/narratives").iterdir()]
    assert len(private) >= 4
    for file in private:
        for kind in ("md5", "sha1", "sha256"):
            digest = hashlib.new(kind, file.read_bytes()).hexdigest()
            assert digest[:12].encode() not in told, (file, kind)


def test_an_input_that_is_named_twice_is_there_once(logged: Logged) -> None:
    client, run = tracking.client(), logged.runs["research"]
    from tasks.mlflow.entities import log_inputs

    dataset = inputs(run)["training"].dataset
    again = {"name": dataset.name, "digest": dataset.digest, "context": "training", "source": "x", "profile": {}}
    log_inputs(client, run.info.run_id, [again])
    assert len(client.get_run(run.info.run_id).inputs.dataset_inputs) == 3


def test_a_model_that_cannot_be_written_stops_no_run_and_is_sent_later(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tasks.experiment import results

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cell_training, "draw_curves", lambda _, path: path.write_bytes(b"picture"))
    cell, parent = static(), tracking.parent_run("tiny", {})
    with monkeypatch.context() as patch:
        patch.setattr(results, "write_model", full)
        run_cell(cell, "cpu", parent)
    assert "No space left" in caplog.text
    assert not (cell.directory / "published").exists()
    run_cell(cell, "cpu", parent)
    assert (cell.directory / "published").exists()
    assert not list(cell.directory.glob(".mlflow*"))
    client = MlflowClient(tracking.tracking_uri())
    assert len(client.search_logged_models([client.get_run(parent).info.experiment_id])) == 1
