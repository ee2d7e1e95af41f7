"""MLflow: a parent run an experiment, a child a cell, and nothing that was not handed over."""

from __future__ import annotations

import math
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking._tracking_service.utils import _tracking_store_registry
from sqlalchemy.exc import OperationalError
from tiny_pipeline import (
    BUDGET,
    STEPS,
    UNITS,
    built,
    copied,
    mode,
    nonprivate,
    prepare_environment,
    quick_pictures,
    read_json,
    static,
)

from dptune.core.errors import DptuneError
from dptune.core.files import locked
from dptune.privacy.ledger_file import read_ledger
from tasks.experiment import cell_training, finetune
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell
from tasks.metrics import legible, tool_name
from tasks.mlflow import tracking
from tasks.mlflow.entities import model_name
from tasks.paths import DATA, TRAIN, planted_secrets
from tasks.report.claims import GUARANTEE, as_users_claim

EPSILONS = {"epsilon_published", "epsilon_noise_only", "epsilon_certified"}
#: All that private telemetry may log.
PUBLIC = {"epsilon/published", "epsilon/noise_only", "epsilon/certified", "training/learning_rate", "perplexity/public"}
PUBLIC |= {"training/noise_multiplier", "training/radius", "training/gradient_norm"}
RESEARCH = {"training/batch_units", "training/batch_loss", "training/clipped_fraction"}
RESEARCH |= {"perplexity/eval_sample", "perplexity/eval"}
MD5 = "0123456789abcdef0123456789abcdef.dir"
LOCK = f"""
schema: '2.0'
stages:
  split:
    cmd: python -m tasks.corpus.split
    outs: [{{path: data/splits, md5: aaaa.dir}}]
  canaries:
    cmd: python -m tasks.corpus.canaries
    outs:
    - {{path: data/canaries, hash: md5, md5: {MD5}, size: 1, nfiles: 2}}
    - {{path: data/secrets, hash: md5, md5: bbbb.dir, size: 1, nfiles: 1}}
"""


@dataclass
class Tracked:
    """What the module's runs left."""

    directory: Path
    client: MlflowClient
    parent: str
    cell: Cell
    result: dict[str, Any]
    child: Run
    private: Run
    free: Run

    def metrics(self, run: Run) -> dict[str, list[tuple[int, float]]]:
        return {
            key: [(metric.step, metric.value) for metric in self.client.get_metric_history(run.info.run_id, key)]
            for key in self.client.get_run(run.info.run_id).data.metrics
        }

    def claimed(self) -> dict[str, Any]:
        """The child's result with the claim that the report shows."""
        return as_users_claim(self.result, self.directory / self.cell.directory / "ledger.jsonl")


def children(client: MlflowClient, parent: str) -> list[Run]:
    experiment = client.get_run(parent).info.experiment_id
    return list(client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'"))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    """A research cell with pictures, one under private telemetry and one without noise, all in one database."""
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("tracked") / "tiny pipeline")
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        Path("dvc.lock").write_text(LOCK)
        parent = tracking.parent_run("tiny", {"telemetry": "research"})
        cell = static()
        result = run_cell(cell, "cpu", parent, flow_run="flow-7")
        quick_pictures(patch)
        second = tracking.parent_run("private", {"telemetry": "private"}, timed=False)
        run_cell(static({"experiment": {"telemetry": "private"}}), "cpu", second)
        third = tracking.parent_run("free", {})
        run_cell(nonprivate(), "cpu", third)
        client = tracking.client()
        child, private, free = (children(client, one)[0] for one in (parent, second, third))
        yield Tracked(directory, client, parent, cell, result, child, private, free)


def test_the_database_is_a_file_in_data(tracked: Tracked) -> None:
    assert tracking.tracking_uri() == f"sqlite:///{tracked.directory / 'data' / 'mlflow.db'}"
    assert (tracked.directory / "data" / "mlflow.db").exists()


def test_a_parent_is_found_again_by_its_name(tracked: Tracked) -> None:
    assert tracking.parent_run("tiny", {"more": "yes"}) == tracked.parent
    parent = tracked.client.get_run(tracked.parent)
    assert parent.data.tags["more"] == "yes"
    assert parent.data.tags["telemetry"] == "research"
    assert parent.info.run_name == "tiny"
    tracking.finish_parent(tracked.parent, failed=True)
    assert tracked.client.get_run(tracked.parent).info.status == "FAILED"
    tracking.finish_parent(tracked.parent, failed=False)
    assert tracked.client.get_run(tracked.parent).info.status == "FINISHED"


def test_flows_look_for_the_parent_one_at_a_time(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once broke each other's new tables, or made a parent each."""

    def look(*_: Any) -> str:
        with pytest.raises(DptuneError, match="another process"), locked(DATA / tracking.MLFLOW_LOCK):
            pass
        return "found"

    monkeypatch.setattr(tracking, "_parent_run", look)
    assert tracking.parent_run("tiny", {}) == "found"
    with locked(DATA / tracking.MLFLOW_LOCK):
        pass


def test_the_child_is_named_and_tagged(tracked: Tracked) -> None:
    assert len(children(tracked.client, tracked.parent)) == 1
    child, tags = tracked.child, tracked.child.data.tags
    assert child.info.run_name == f"static eps {BUDGET:g} seed 0 (small)"
    assert tags["cell"] == tracked.cell.label
    assert child.info.status == "FINISHED"
    assert tags["telemetry"] == "research"
    assert tags["guarantee"] == GUARANTEE["research"]
    assert tags["data_kind"] == "SYNTHETIC"
    assert "SYNTHETIC" in tags["data"]
    assert tags["git_commit"] == "none", "the pipeline's directory is no git repository"
    assert tags["prefect_flow_run"] == "flow-7"
    assert tags["ledger_run_id"] == read_ledger(tracked.cell.directory / "ledger.jsonl").header.run_id


def test_the_child_carries_dvcs_hash_of_the_training_data(tracked: Tracked) -> None:
    """DVC tracks the folder data/canaries, which holds the training file."""
    assert tracked.child.data.tags["dvc_hash"] == MD5
    assert "dvc_hash" not in tracked.private.data.tags, "not even a digest of the records"


def test_the_child_has_every_parameter(tracked: Tracked) -> None:
    params = tracked.child.data.params
    assert params["mechanism"] == "static"
    assert params["mechanism.max_grad_norm"] == str(tracked.cell.options["max_grad_norm"])
    assert float(params["budget_epsilon"]) == BUDGET
    assert float(params["noise_multiplier"]) == tracked.result["noise_multiplier"]
    assert float(params["sample_rate"]) == tracked.result["sample_rate"]
    assert (params["steps"], params["unit"], params["units"], params["seed"]) == (
        str(STEPS),
        "record",
        str(UNITS),
        "0",
    )
    assert {f"training.{key}" for key in asdict(tracked.cell.training)} <= set(params)
    assert {f"lora.{key}" for key in asdict(tracked.cell.lora)} <= set(params)


def test_metrics_are_there_at_every_step_and_the_epsilons_grow(tracked: Tracked) -> None:
    metrics = tracked.metrics(tracked.child)
    assert set(metrics) == PUBLIC | RESEARCH
    for name in ("learning_rate", "noise_multiplier", "gradient_norm", "batch_units"):
        assert [step for step, _ in metrics[f"training/{name}"]] == list(range(1, STEPS + 1))
    claimed = tracked.claimed()
    assert claimed["epsilon_published"] > 1.5 * tracked.result["epsilon_published"], "what its users claim"
    for name in EPSILONS:
        points, ends = metrics[tool_name(name)], claimed[name]
        assert [step for step, _ in points] == [2, 4, 4], "while training, and of the whole ledger"
        assert points[0][1] < points[1][1] == legible(name, tracked.result[name])
        assert ends <= points[2][1] <= 1.001 * ends, "rounded up, never down"
    after = {name: legible(name, value) for name, value in tracked.result["after"].items()}
    assert metrics["perplexity/eval"] == [(STEPS, after["eval_perplexity"])]
    assert dict(metrics["perplexity/public"])[STEPS] == after["public_perplexity"]


@given(st.floats(1e-6, 1e6))
def test_an_epsilon_in_mlflow_is_no_less_than_what_was_paid_and_no_more_than_what_was_shown(value: float) -> None:
    for name in ("epsilon_certified", "best_epsilon_published", "choosing.all.epsilon", "audit_step_mu_certified"):
        assert value * (1 - 1e-11) <= legible(name, value) <= 1.001 * value, name  # 12 digits are what was meant
        assert len(f"{legible(name, value):.12g}".strip("0.").replace(".", "").partition("e")[0]) <= 4
    for name in ("epsilon_audited", "audit_step_mu_audited", "audit_one_run_epsilon_refutable"):
        assert 0.999 * value <= legible(name, value) <= value * (1 + 1e-11), name
    assert legible("eval_perplexity", value) == pytest.approx(value, rel=1e-5)
    assert legible("gradient_norm", value) == value
    assert legible("epsilon_certified", math.inf) == math.inf


def test_the_artifacts_are_there(tracked: Tracked, tmp_path: Path) -> None:
    run = tracked.child.info.run_id
    assert {item.path for item in tracked.client.list_artifacts(run)} == {
        "curves.png",
        "ledger.jsonl",
        "result.json",
        "steps.csv",
    }
    ledger = Path(tracked.client.download_artifacts(run, "ledger.jsonl", str(tmp_path)))
    assert read_ledger(ledger).epsilons.certified == tracked.result["epsilon_certified"]
    assert read_ledger(ledger).complete
    result = Path(tracked.client.download_artifacts(run, "result.json", str(tmp_path)))
    assert read_json(result)["label"] == tracked.cell.label
    picture = Path(tracked.client.download_artifacts(run, "curves.png", str(tmp_path)))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_artifacts_lie_beside_the_database(tracked: Tracked) -> None:
    assert tracked.child.info.artifact_uri.startswith((tracked.directory / "data" / "mlartifacts").as_uri())


def test_private_telemetry_logs_only_releases_and_public_data(tracked: Tracked) -> None:
    assert set(tracked.metrics(tracked.private)) == PUBLIC
    assert tracked.private.data.tags["telemetry"] == "private"
    assert tracked.private.data.tags["guarantee"] == GUARANTEE["private"]


def test_an_infinite_epsilon_is_said_in_words_and_no_guarantee_claimed(tracked: Tracked) -> None:
    """As a figure it would be 1.8e308 in MLflow's tables, and every chart with it would be empty."""
    tags = tracked.free.data.tags
    assert not set(map(tool_name, EPSILONS)) & set(tracked.metrics(tracked.free))
    assert {tags[f"epsilon {name}"] for name in ("published", "noise_only", "certified")} == {"∞"}
    assert tags["guarantee"].startswith("No guarantee: ")


def test_epsilons_are_tags_that_never_promise_more_than_the_ledger(tracked: Tracked) -> None:
    claimed = tracked.claimed()
    for name in EPSILONS:
        shown = float(tracked.child.data.tags[name.replace("_", " ", 1)])
        assert claimed[name] <= shown <= 1.01 * claimed[name]


def test_no_secret_is_in_the_database_or_the_artifacts(tracked: Tracked) -> None:
    secrets = [c["secret"] for group in ("extraction", "audit") for c in read_json(planted_secrets())[group]]
    places = [Path("data/mlflow.db"), *(path for path in Path("data/mlartifacts").rglob("*") if path.is_file())]
    assert len(places) > 5
    for path in places:
        assert not [secret for secret in secrets if secret.encode() in path.read_bytes()], path


class Killed(BaseException):
    """Stands for SIGKILL."""


def once(real: Any) -> Any:
    calls: list[int] = []

    def raising(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise Killed
        return real(*args, **kwargs)

    return raising


@pytest.mark.parametrize(("module", "place"), [(cell_training, "write_adapter"), (finetune, "publish")])
def test_a_killed_cell_is_continued_in_the_same_run_and_ends_finished(
    pipeline: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, module: Any, place: str
) -> None:
    parent, cell = tracking.parent_run("tiny", {}), static()
    monkeypatch.setattr(module, place, once(getattr(module, place)))
    with pytest.raises(Killed):
        run_cell(cell, "cpu", parent)
    for ledger in opened:
        ledger.close()
    client = tracking.client()
    (before,) = children(client, parent)
    assert before.info.status != "FINISHED"
    run_cell(cell, "cpu", parent)
    (after,) = children(client, parent)
    assert after.info.run_id == before.info.run_id
    assert after.info.status == "FINISHED"
    assert {"curves.png", "ledger.jsonl", "result.json", "steps.csv"} == {
        item.path for item in client.list_artifacts(after.info.run_id)
    }
    (model,) = client.search_logged_models([after.info.experiment_id])
    assert (model.name, model.status, model.source_run_id) == (model_name(cell.label), "READY", after.info.run_id)
    assert set(after.data.metrics) >= PUBLIC
    steps = [metric.step for metric in client.get_metric_history(after.info.run_id, "training/noise_multiplier")]
    assert steps == list(range(1, STEPS + 1))


def test_another_server_is_taken_from_the_environment(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = pipeline / "elsewhere.db"
    elsewhere.write_bytes(Path("data/mlflow.db").read_bytes())
    before = Path("data/mlflow.db").read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}")
    assert tracking.tracking_uri() == f"sqlite:///{elsewhere}"
    run = tracking.parent_run("tiny", {"a": "b"})
    assert MlflowClient(f"sqlite:///{elsewhere}").get_run(run).data.tags["a"] == "b"
    assert Path("data/mlflow.db").read_bytes() == before


def test_many_metrics_are_sent_in_parts(pipeline: Path) -> None:
    parent = tracking.parent_run("tiny", {})
    child = tracking.ChildRun(parent, "many", Path("marker"), {"p": 1}, {"t": "x"})
    for step in range(700):
        child.log(step, {"a": float(step), "b": math.inf})
    child.end()
    client = tracking.client()
    assert len(client.get_metric_history(child.run_id, "a")) == 700
    assert client.get_metric_history(child.run_id, "b") == [], "MLflow would keep 1.8e308 of it"
    assert Path("marker").read_text() == child.run_id
    again = tracking.ChildRun(parent, "many", Path("marker"), {"p": 2}, {})
    assert again.run_id == child.run_id
    assert client.get_run(child.run_id).info.status == "RUNNING"
    assert client.get_run(child.run_id).data.params == {"p": "1"}


def test_a_run_that_the_server_does_not_know_is_started_anew(pipeline: Path) -> None:
    """The database was removed, or another server is in use now; the cell's folder is not wrong for that."""
    parent = tracking.parent_run("tiny", {})
    Path("marker").write_text("0" * 32)
    child = tracking.ChildRun(parent, "again", Path("marker"), {"p": 1}, {})
    assert tracking.client().get_run(child.run_id).data.params == {"p": "1"}
    assert Path("marker").read_text() == child.run_id


def test_what_was_deleted_in_mlflows_page_is_restored_and_goes_on(pipeline: Path) -> None:
    """Its page puts experiments and runs away; a study that runs again logs to them as before."""
    parent = tracking.parent_run("tiny", {})
    child = tracking.ChildRun(parent, "one", Path("marker"), {"p": 1}, {})
    child.log(1, {"loss": 2.0})
    assert child.end()
    client = tracking.client()
    client.delete_run(child.run_id)
    client.delete_experiment(client.get_run(parent).info.experiment_id)
    assert tracking.parent_run("tiny", {}) == parent
    again = tracking.ChildRun(parent, "one", Path("marker"), {"p": 1}, {})
    again.log(2, {"loss": 1.0})
    assert again.end()
    assert again.run_id == child.run_id
    found = client.get_run(child.run_id)
    assert found.info.lifecycle_stage == "active"
    assert [point.value for point in client.get_metric_history(child.run_id, "loss")] == [2.0, 1.0]


def test_names_that_mlflow_does_not_take_are_written_otherwise(pipeline: Path) -> None:
    names = ("mechanisms.\u00e9:[0]", "x" * 300, "a%b")
    parent = tracking.parent_run("tiny", {})
    child = tracking.ChildRun(parent, "n", Path("marker"), dict.fromkeys(names, 1), {"t{}": "x"})
    child.log(1, {"loss@2": 1.0})
    assert child.end()
    data = tracking.client().get_run(child.run_id).data
    assert len(data.params) == 3
    assert data.metrics == {"loss_2": 1.0}
    assert data.tags["t__"] == "x"


def test_a_refusal_of_mlflow_says_what_mlflow_says(pipeline: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tracking.optional("a run"):
        tracking.client().get_run("0" * 32)
    assert "not found" in caplog.text
    assert "mend what MLflow names" in caplog.text
    assert "free or restore" not in caplog.text


def test_the_commit_is_named_with_its_changes(empty: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *names, *words], check=True, capture_output=True, text=True).stdout.strip()

    assert tracking.git_commit() == "none"
    git("init", "-q")
    assert tracking.git_commit() == "none"
    Path("file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert tracking.git_commit() == commit
    Path("file").write_text("2")
    assert tracking.git_commit() == f"{commit}+changes"


@pytest.mark.parametrize("content", [None, "", "stages: {}", "nonsense", "{a: [", "stages: {split: {cmd: x}}"])
def test_without_a_lock_there_is_no_hash(empty: Path, content: str | None) -> None:
    if content is not None:
        Path("dvc.lock").write_text(content)
    assert tracking.dvc_hash(TRAIN) == "none"


def test_the_hash_is_that_of_the_output(empty: Path) -> None:
    Path("dvc.lock").write_text(LOCK)
    assert tracking.dvc_hash(Path("data/canaries")) == MD5
    assert tracking.dvc_hash(Path("data/splits")) == "aaaa.dir"
    assert tracking.dvc_hash(Path("data/other")) == "none"


def is_locked(*_: Any, **__: Any) -> None:
    raise MlflowException("(sqlite3.OperationalError) database is locked")


def test_a_locked_database_stops_no_run_and_what_it_missed_is_sent_later_without_times(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parent, cell = tracking.parent_run("tiny", {}, timed=False), static({"experiment": {"telemetry": "private"}})
    unsent = cell.directory / "mlflow_run_unsent.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(tracking, "BATCH", 1)  # it is asked at every step, and fails at every step
        patch.setattr(MlflowClient, "log_batch", is_locked)
        run_cell(cell, "cpu", parent)
    contents = read_ledger(cell.directory / "ledger.jsonl")
    assert contents.complete
    assert contents.releases == STEPS
    warned = [record.getMessage() for record in caplog.records if "MLflow did not take" in record.getMessage()]
    assert 1 <= len(warned) <= 2, "one of the run, one of its results"
    assert all("MLFLOW_TRACKING_URI" in text and "database is locked" in text for text in warned)
    assert mode(unsent) == 0o600
    assert not (cell.directory / "published").exists()
    run_cell(cell, "cpu", parent)
    assert read_ledger(cell.directory / "ledger.jsonl") == contents
    assert (cell.directory / "published").exists()
    assert not unsent.exists()
    (child,) = children(tracking.client(), parent)
    assert child.data.params["mechanism"] == "static"
    assert child.data.tags["telemetry"] == "private"
    assert (child.info.start_time, child.info.end_time) == (tracking.NO_TIME, tracking.NO_TIME)
    for name in child.data.metrics:
        history = tracking.client().get_metric_history(child.info.run_id, name)
        assert {metric.timestamp for metric in history} == {tracking.NO_TIME}
        if name == "training/noise_multiplier":
            assert [metric.step for metric in history] == list(range(1, STEPS + 1))
    assert set(child.data.metrics) == PUBLIC


def test_a_refusal_of_the_database_is_a_sentence_and_no_traceback(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OperationalError("SELECT name FROM runs", {}, sqlite3.OperationalError("database is locked"))

    parent = tracking.parent_run("tiny", {})
    child = tracking.ChildRun(parent, "run", Path("marker"), {"p": 1}, {"t": "x"})
    monkeypatch.setattr(SqlAlchemyStore, "_get_run", refuse)
    child.log(1, {"a": 0.5})
    assert not child.end()
    (warned,) = [record.getMessage() for record in caplog.records if record.name == tracking.__name__]
    assert "did not take the metrics of run ((sqlite3.OperationalError) database is locked). The work goes on" in warned
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_dead_server_is_asked_once_and_gets_everything_when_it_lives(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def refused(uri: str, **_: Any) -> None:
        asked.append(uri)
        raise requests.ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(tracking.requests, "head", refused)
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        parent = tracking.parent_run("tiny", {})
        assert parent == tracking.LATER
        child = tracking.ChildRun(parent, "run", Path("marker"), {"p": 1}, {"t": "x"})
        child.log(1, {"a": 0.5})
        assert not child.end()
        tracking.send(parent, Path("params.yaml"))
        tracking.finish_parent(parent, failed=False)
    assert asked == ["http://127.0.0.1:9"]
    (warned,) = [record.getMessage() for record in caplog.records if record.name == tracking.__name__]
    assert warned.startswith("MLFLOW_TRACKING_URI: ")
    assert "http://127.0.0.1:9" in warned
    parent = tracking.parent_run("tiny", {})
    again = tracking.ChildRun(parent, "run", Path("marker"), {}, {})
    assert again.end()
    found = tracking.client().get_run(again.run_id)
    assert (found.data.params, found.data.metrics, found.data.tags["t"]) == ({"p": "1"}, {"a": 0.5}, "x")


def test_results_that_cannot_be_sent_do_not_keep_those_of_another_cell(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, real = [static(), nonprivate()], finetune.publish
    both = sorted(both, key=lambda cell: cell.directory)

    def fails(directory: Path, parent: str | None) -> None:
        if directory == both[0].directory:
            raise ValueError("no such picture")
        real(directory, parent)

    monkeypatch.setattr(finetune, "publish", fails)
    with pytest.raises(RuntimeError, match="no such picture"):
        finetune.run_cells(both, "cpu", tracking.parent_run("tiny", {}))
    assert [(cell.directory / "published").exists() for cell in both] == [False, True]


def test_a_line_that_a_killed_process_left_unfinished_is_skipped(pipeline: Path) -> None:
    Path("marker_unsent.jsonl").write_text('{"params": {"p": "1"}, "tags": {}}\n{"metrics": {"a": 1.0}, "st')
    child = tracking.ChildRun(tracking.parent_run("tiny", {}), "run", Path("marker"), {}, {})
    child.log(2, {"a": 2.0})
    assert child.end()
    assert tracking.client().get_run(child.run_id).data.metrics == {"a": 2.0}


@pytest.mark.parametrize("name", ["per%20cent que?ry sh#arp", "sp ace"])
def test_the_database_is_found_in_a_folder_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each of these signs means something else in an address, and MLflow makes the folders that it reads there."""
    folder = tmp_path / name
    (folder / "data").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # MLflow keeps connections by address. A relative one may lead to an earlier test's file, which is gone.
    monkeypatch.setattr(SqlAlchemyStore, "_engine_map", {})
    _tracking_store_registry._get_store_with_resolved_uri.cache_clear()
    run = tracking.parent_run("tiny", {"a": "b"})
    assert run != tracking.LATER
    assert (folder / "data" / "mlflow.db").exists()
    assert tracking.client().get_run(run).data.tags["a"] == "b"
    child = tracking.ChildRun(run, "run", Path("marker"), {}, {})
    child.artifact(Path("marker"))
    assert child.end()
    assert list(tmp_path.iterdir()) == [folder], "nothing beside it"
