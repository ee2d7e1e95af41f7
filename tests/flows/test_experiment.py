"""The experiment flow: the whole road once with real processes, then its rules with a stand-in for them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_pipeline import BUDGET, built, cells, copied, prepare_environment, read_json, write_params

from dptune.core.errors import ConfigError, DataError
from dptune.privacy.ledger_file import read_ledger
from dptune.records.parquet_file import read_records
from flows import experiment as module
from flows.common import child, runners
from flows.common.runners import available_devices
from flows.experiment import experiment
from tasks.mlflow import tracking
from tasks.mlflow.experiments import VIEW, remembered
from tasks.paths import (
    EVAL,
    EXPERIMENT,
    FAILURES,
    NARRATIVES,
    PUBLIC_VALIDATION,
    REPORT,
    RUNS,
    SPLITS,
    TRAIN,
    planted_secrets,
)
from tasks.report.experiment import report
from tasks.settings.params import load_settings
from tasks.stage import ERROR_FILE, run_stage

pytestmark = [pytest.mark.system, pytest.mark.road]

#: Both cells in one process: what a process imports takes longer than a tiny cell.
QUICK = {"experiment": {"cells_together": 2}}
#: Each cell in a process of its own, all at once, for a stand-in plays one cell.
APART = {"experiment": {"cells_per_device": 4}}
# A cell's process, without the cell: notes when it ran, and ends as ``plan.json`` says.
# A shell line that is also a Python string: a "#!" line cannot name an interpreter whose path has a space.
STAND_IN = """#!/bin/sh
"exec" "{python}" "$0" "$@"
import json, os, pathlib, sys, time
cell = json.loads(pathlib.Path(sys.argv[5]).read_text())
label = cell["mechanism"] + str(cell["epsilon"] or "")
device = sys.argv[sys.argv.index("--device") + 1]
plan = json.loads(pathlib.Path("plan.json").read_text())
started = time.time()
time.sleep(plan.get("seconds", 0))
threads, waits = os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY")
about = dict(label=label, device=device, threads=threads, waits=waits, argv=sys.argv[4:])
runs = pathlib.Path("ran.jsonl").read_text().splitlines() if pathlib.Path("ran.jsonl").exists() else []
tries = sum(json.loads(run)["label"] == label for run in runs)
with open("ran.jsonl", "a") as file:
    print(json.dumps(about | dict(start=started, end=time.time())), file=file)
print("a line of", label)
print(plan.get("say", ""), "\\n", "and a warning at the end", sep="")
statuses = plan.get("status", {{}}).get(label, [])
sys.exit(statuses[tries] if tries < len(statuses) else 0)
"""


@dataclass
class Finished:
    """What a whole experiment and its report left."""

    directory: Path
    output: str
    secrets: list[str]


@pytest.fixture(scope="module")
def finished(server: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """``python -m flows.experiment`` as DVC runs it, then the report."""
    directory = copied(built(tmp_path_factory), tmp_path_factory.mktemp("whole") / "tiny pipeline")
    with pytest.MonkeyPatch.context() as patch:
        prepare_environment(patch, directory)
        patch.setenv("PREFECT_API_URL", server)
        write_params(QUICK)
        ran = subprocess.run([sys.executable, "-m", "flows.experiment"], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            report()
        stored = read_json(planted_secrets())
        secrets = [one["secret"] for group in ("extraction", "audit") for one in stored[group]]
    return Finished(directory, "".join([ran.stdout, ran.stderr, out.getvalue(), err.getvalue()]), secrets)


@pytest.fixture
def whole(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> Finished:
    """The same, as the current directory."""
    prepare_environment(monkeypatch, finished.directory)
    return finished


@pytest.fixture
def stand_in(server: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Cells run the stand-in; call it with its plan."""
    return standing_in(pipeline, monkeypatch)


def standing_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    script = directory.parent / "stand-in"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=StringIO()))
    monkeypatch.setattr(child, "sys", SimpleNamespace(executable=str(script)))

    def plan(**entries: Any) -> None:
        Path("plan.json").write_text(json.dumps(entries))

    plan()
    return plan


def ran() -> list[dict[str, Any]]:
    """The stand-in's runs, in order of their end."""
    path = Path("ran.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def labels() -> list[str]:
    return sorted(run["label"] for run in ran())


# ---- the whole road


def test_every_cell_of_the_grid_is_done(whole: Finished) -> None:
    listed = read_json(EXPERIMENT)
    assert listed["name"] == "tiny"
    assert listed["cells"] == [cell.directory.name for cell in cells()]
    for name in listed["cells"]:
        assert read_ledger(RUNS / name / "ledger.jsonl").complete
        assert (RUNS / name / "adapter" / "adapter_model.safetensors").exists()
    static = read_json(RUNS / listed["cells"][1] / "result.json")
    assert static["mechanism"] == "static"
    assert static["epsilon_certified"] <= BUDGET
    for line in ("1 of 2 cells", "2 of 2 cells"):
        assert line in whole.output


def test_mlflow_has_a_parent_and_its_children(whole: Finished) -> None:
    client, parent = tracking.client(), tracking.parent_run("tiny", {})
    run = client.get_run(parent)
    assert run.info.status == "FINISHED"
    assert run.data.tags["telemetry"] == "research"
    assert {item.path for item in client.list_artifacts(parent, "report")} >= {"report/report.html"}
    children = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert {child.data.tags["cell"] for child in children} == {cell.label for cell in cells()}
    assert {child.info.status for child in children} == {"FINISHED"}
    flows = {child.data.tags["prefect_flow_run"] for child in children}
    assert flows == {run.data.tags["prefect_flow_run"]}
    assert re.fullmatch(r"[0-9a-f-]{36}", flows.pop())


def test_the_printed_links_open_a_view_of_exactly_these_cells_and_the_parent_has_the_headline(whole: Finished) -> None:
    client, parent = tracking.client(), tracking.parent_run("tiny", {})
    number = client.get_run(parent).info.experiment_id
    view = json.loads(client.get_experiment(number).tags[f"mlflow.sharedViewState.{VIEW}"])
    shown = client.search_runs([number], json.loads(view["state"])["searchFilter"])
    assert {run.data.tags["cell"] for run in shown} == {cell.label for cell in cells()}
    links = remembered()
    assert links is not None
    assert links.table in whole.output
    assert links.charts in whole.output
    assert client.get_run(parent).data.metrics["epsilon/certified"] <= BUDGET
    assert len(shown[0].data.metrics) <= 25


def test_the_report_shows_the_experiment(whole: Finished) -> None:
    page = (REPORT / "report.html").read_text()
    assert "SYNTHETIC" in page
    assert all(cell.label in page for cell in cells())
    assert set(read_json(REPORT / "cells.json")) == {cell.label for cell in cells()}


def test_no_secret_and_no_record_is_anywhere_else(whole: Finished) -> None:
    """Not in a file that is not theirs, not in the output, not in MLflow, not in Prefect's logs."""
    from prefect.client.orchestration import get_client

    private = {path: read_records(path).text.to_pylist() for path in (NARRATIVES, TRAIN, EVAL)}
    texts = sorted({text for one in private.values() for text in one} - {""})
    allowed = [Path("data/raw"), NARRATIVES.parent, SPLITS, TRAIN, planted_secrets()]
    files = [path for path in Path("data").rglob("*") if path.is_file()]
    open_files = [path for path in files if not any(path.is_relative_to(one) for one in allowed)]
    assert {"mlflow.db", "report.html", "result.json", "ledger.jsonl"} <= {path.name for path in open_files}
    places = {str(path): path.read_bytes() for path in open_files} | {"output": whole.output.encode()}
    with get_client(sync_client=True) as client:
        logs = [log.message for log in client.read_logs(limit=200)]
    assert any("4 of 4 releases" in message for message in logs), "a cell's output is a log of its task"
    places["logs"] = "\n".join(logs).encode()
    for name, content in places.items():
        assert not [secret for secret in whole.secrets if secret.encode() in content], name
        assert not [text for text in texts if text.encode() in content], name
    for path in (path for path in files if path not in (planted_secrets(), TRAIN)):
        assert not [secret for secret in whole.secrets if secret.encode() in path.read_bytes()], path


def test_only_the_owner_reads_what_the_experiment_wrote(whole: Finished) -> None:
    files = [path for path in RUNS.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert {path: oct(path.stat().st_mode) for path in files if path.stat().st_mode & 0o077} == {}


def test_running_again_runs_no_cell_and_a_removed_folder_one(whole: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    standing_in(whole.directory, monkeypatch)
    write_params()
    before = {path: path.read_bytes() for path in RUNS.rglob("*") if path.is_file()}
    folders = experiment()
    assert ran() == []
    assert {path: path.read_bytes() for path in RUNS.rglob("*") if path.is_file()} == before
    shutil.move(folders[0], whole.directory / "kept")
    try:
        assert experiment() == folders
        assert labels() == ["nonprivate"]
    finally:
        shutil.rmtree(folders[0])
        shutil.move(whole.directory / "kept", folders[0])


# ---- the rules


def test_one_more_epsilon_runs_only_its_cells(stand_in: Callable[..., None]) -> None:
    write_params(APART)
    experiment()
    assert labels() == ["nonprivate", f"static{BUDGET}"]
    experiment(epsilons=[BUDGET, 4])
    assert labels() == ["nonprivate", f"static{BUDGET}", "static4.0"]


def test_the_log_names_entries_that_keep_epsilons_of_their_own(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form's epsilons are the experiment's, and an entry's own win over those."""
    said: list[str] = []
    log = SimpleNamespace(info=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(module, "get_run_logger", lambda: log)
    write_params({"mechanisms": {"static": {"epsilons": [3, 0.5]}}})
    experiment(epsilons=[BUDGET, 4])
    assert labels() == ["nonprivate", "static0.5", "static3.0"]
    kept = [line for line in said if "epsilons of their own" in line]
    assert kept == [
        "entries of params.yaml with epsilons of their own keep those, whatever the experiment's (here 0.3, 4): "
        "static at 3, 0.5"
    ]
    said.clear()
    write_params()
    experiment()
    assert not [line for line in said if "of their own" in line]


def test_the_process_is_told_its_cell_device_and_runs(stand_in: Callable[..., None]) -> None:
    write_params()
    (folder,) = experiment(mechanisms=["nonprivate"])
    (run,) = ran()
    assert run["argv"][0] == "tasks.experiment.finetune"
    assert run["argv"][-1] == "--wait"
    options = dict(zip(run["argv"][2:-1:2], run["argv"][3::2], strict=True))
    assert options["--device"] == "cpu"
    parent = tracking.client().get_run(options["--parent"])
    assert parent.data.tags["prefect_flow_run"] == options["--flow-run"]
    assert Path(run["argv"][1]) == Path(folder) / "cell.json"


def test_a_failed_cell_stops_no_other_and_is_named(stand_in: Callable[..., None]) -> None:
    write_params(APART)
    stand_in(status={f"static{BUDGET}": [1]})
    with pytest.raises(RuntimeError, match=rf"1 of 3 cells failed: small\.static\.eps{BUDGET}\.seed0$"):
        experiment(epsilons=[BUDGET, 4])
    assert labels() == ["nonprivate", f"static{BUDGET}", "static4.0"]
    parent = tracking.parent_run("tiny", {})
    assert tracking.client().get_run(parent).info.status == "FAILED"
    experiment(epsilons=[BUDGET, 4])
    assert labels() == ["nonprivate", f"static{BUDGET}", f"static{BUDGET}", "static4.0"]
    assert tracking.client().get_run(parent).info.status == "FINISHED"


def test_cells_of_one_model_share_a_process(stand_in: Callable[..., None]) -> None:
    write_params({"experiment": {"cells_together": 3, "cells_per_device": 1}})
    stand_in(status={"static1.0": [1]})
    with pytest.raises(RuntimeError, match=r"2 of 2 cells failed: small\.static\.eps1\.seed0, small\."):
        experiment(epsilons=[1, 4], mechanisms=["static"])
    folders = experiment(epsilons=[1, 4], mechanisms=["static"])
    assert len(ran()) == 2
    for run in ran():
        assert run["argv"][1:4] == [*(str(Path(folder) / "cell.json") for folder in folders), "--device"]
    experiment(epsilons=[1, 4], mechanisms=["static"])
    assert len(ran()) == 2


def test_finished_cells_start_no_process(whole: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another grouping left no result of Prefect's in their folders."""
    standing_in(whole.directory, monkeypatch)
    write_params({"experiment": {"cells_together": 8}})
    before, kept = ran(), list(RUNS.glob("*/prefect_result*"))
    assert len(kept) == 2
    for path in kept:
        path.unlink()
    experiment()
    assert ran() == before


def test_retries_mend_what_can_be_mended_and_nothing_else(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2 is the user's error; any other, a signal's included, may pass."""
    monkeypatch.setattr(module.fine_tune, "retry_delay_seconds", 0)
    write_params(APART, {"experiment": {"retries": 2}})
    stand_in(status={"nonprivate": [2, 0], "static1.0": [1, 137, 0], "static4.0": [1, 1, 1, 0]})
    with pytest.raises(RuntimeError) as failed:
        experiment(epsilons=[1, 4])
    assert str(failed.value).startswith("2 of 3 cells failed: ")
    assert "small.nonprivate.seed0" in str(failed.value)
    assert "small.static.eps4.seed0" in str(failed.value)
    assert labels() == ["nonprivate", *["static1.0"] * 3, *["static4.0"] * 3]


def test_a_device_runs_no_more_cells_than_it_may(stand_in: Callable[..., None]) -> None:
    stand_in(seconds=1.0)
    write_params({"experiment": {"devices": ["cpu", "cuda:7"], "cells_per_device": 1}})
    experiment(epsilons=[1, 2, 4], mechanisms=["static", "nonprivate"])
    assert len(ran()) == 4
    for device in ("cpu", "cuda:7"):
        runs = sorted((run["start"], run["end"]) for run in ran() if run["device"] == device)
        assert runs
        assert all(first[1] <= second[0] for first, second in pairwise(runs)), device


def test_cells_side_by_side_share_the_cores(stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a lone cell has them all, where nobody chose a number of threads. Threads that wait sleep."""
    cores, two = set(range(8)), {"experiment": {"cells_per_device": 2}}
    monkeypatch.setattr(runners.os, "sched_getaffinity", lambda _: cores)
    monkeypatch.delenv("OMP_NUM_THREADS")
    write_params(two)
    experiment(epsilons=[1, 4], mechanisms=["static"])
    experiment(mechanisms=["nonprivate"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    experiment(epsilons=[2], mechanisms=["static"])
    assert [run["threads"] for run in ran()] == ["4", "4", "8", "3"]
    assert {run["waits"] for run in ran()} == {"PASSIVE"}


def test_settings_that_are_wrong_stop_the_flow_before_any_cell(stand_in: Callable[..., None]) -> None:
    write_params()
    with pytest.raises(ConfigError, match=r"experiment\.epsilons"):
        experiment(epsilons=[-1])
    assert ran() == []


@pytest.mark.parametrize(("file", "stage"), [(PUBLIC_VALIDATION, "validation"), (EVAL, "split")])
def test_a_run_without_its_records_names_the_stage_that_makes_them(
    stand_in: Callable[..., None], file: Path, stage: str
) -> None:
    """A work pool's run begins with the flow: no command has looked before."""
    write_params(APART)
    stand_in()
    file.unlink()
    with pytest.raises(DataError, match=f"{file.name}: is missing: the stage {stage} makes it. Fix: "):
        experiment()


def test_the_last_line_of_a_failed_command_is_the_first_cells_cause(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A cell that failed for a reason of its own makes the status 1 and has its traceback kept; a user's error is 2."""
    write_params()
    monkeypatch.setattr(module.sys, "exit", sys.exit, raising=False)
    monkeypatch.setenv(ERROR_FILE, str(Path("said").resolve()))
    said = "error: lora.rank: is too large. Fix: lower it."
    stand_in(status={"nonprivate": [2, 2], f"static{BUDGET}": [1, 0]}, say=said)
    kept = []
    for failed, status in ((2, 1), (1, 2)):
        with pytest.raises(SystemExit) as ended:
            run_stage(module.main)
        assert ended.value.code == status
        printed = capfd.readouterr()
        summary, last = printed.err.splitlines()[-2:]
        assert last == said
        assert Path("said").read_text() == f"{said}\n"
        assert summary.startswith(f"{failed} of 2 cells failed: small.nonprivate.seed0")
        assert "Traceback" not in printed.err + printed.out
        kept.append(FAILURES.read_text())
    assert kept[0].count("Traceback") == 1
    assert kept[1] == kept[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experiment": {"epsilons": [-1]}}, r"params\.yaml: experiment\.epsilons\.0: "),
        ({"experiment": {"devices": ["cuda:99"]}}, r"experiment\.devices: 'cuda:99' cannot be used"),
        ({"lora": {"target_modules": ["nosuch"]}}, r"lora\.target_modules .*experiment\.models\.small"),
        (None, r"data/canaries/train\.parquet: is missing: the stage canaries makes it"),
    ],
)
def test_what_cannot_be_is_said_before_a_server_starts(
    pipeline: Path, changes: Any, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_params(changes or {})
    if changes is None:
        TRAIN.unlink()
    monkeypatch.setattr(module, "experiment", lambda: pytest.fail("the flow was started"))
    with pytest.raises(SystemExit) as ended:
        run_stage(module.main)
    assert ended.value.code == 2
    assert re.fullmatch(rf"error: {named}.* Fix: .*\.\n", capsys.readouterr().err)


def test_devices_are_those_named_or_all(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_params({"experiment": {"devices": ["cuda:1", "cpu"]}})
    assert available_devices(load_settings().experiment) == ["cuda:1", "cpu"]
    write_params({"experiment": {"devices": "auto"}})
    settings = load_settings().experiment
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert available_devices(settings) == ["cuda:0", "cuda:1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert available_devices(settings) == ["cpu"]


def test_an_interrupted_flow_leaves_no_process(stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(real(*args, **kwargs))
        return started[-1]

    def interrupted(_: object) -> Iterator[str]:
        raise KeyboardInterrupt
        yield ""

    monkeypatch.setattr(runners, "get_run_logger", lambda: None)
    monkeypatch.setattr(runners.subprocess, "Popen", popen)
    monkeypatch.setattr(runners, "_lines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runners.run_process("x", [sys.executable, "-c", "import signal; signal.pause()"])  # ends only when it is ended
    assert started[0].poll() is not None
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)
