"""`make repro`: what it shows of DVC's run at a terminal and elsewhere, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from dptune.core.progress import EVENTS, Meter
from flows.repro import StageDisplay, _close

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]

# Stands for DVC: what it prints for three stages, of which one did not change and one draws a meter.
_DVC = """
import os, sys, time
print("Stage 'acquire' didn't change, skipping", flush=True)
print("Running stage 'train':\\n> python -m train\\nINFO chatter\\nWARNING odd", flush=True)
print("Updating lock file 'dvc.lock'", flush=True)
print("WARNING: No file hash info found for '/x/data/raw'. It won't be created.", flush=True)
from dptune.core.progress import Meter
with Meter("cell one", total=4, unit="steps") as meter:
    time.sleep(0.4)
    meter.update(3)
    time.sleep(0.4)
print("Running stage 'report':", flush=True)
if status := int(os.environ["STATUS"]):
    if os.environ["CAUSE"]:
        open(os.environ["DPTUNE_ERROR_FILE"], "w").write(os.environ["CAUSE"])
    print("ERROR: failed to reproduce 'report'", flush=True)
    sys.exit(status)
os.makedirs("data/report", exist_ok=True)
open("data/report/answer.md", "w").write("X is best.\\n")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "dvc").mkdir()
    (tmp_path / "dvc" / "__init__.py").touch()
    (tmp_path / "dvc" / "__main__.py").write_text(_DVC)
    (tmp_path / "dvc.yaml").write_text("stages: {acquire: {}, train: {}, report: {}}")
    return tmp_path


def start(checkout: Path, status: int, cause: str = "", **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "STATUS": str(status), "CAUSE": cause, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    environment.pop(EVENTS, None)
    command = [sys.executable, "-m", "flows.repro"]
    return subprocess.Popen(command, cwd=checkout, env=environment, text=True, **options)  # type: ignore[call-overload, no-any-return]


def passed_on(checkout: Path, status: int, cause: str = "") -> tuple[int, list[str]]:
    """Status and lines of a run whose output is a file."""
    process = start(checkout, status, cause, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return process.wait(), process.communicate()[0].splitlines()


def at_a_terminal(checkout: Path, status: int, cause: str = "") -> tuple[int, str]:
    ours, theirs = pty.openpty()
    process = start(checkout, status, cause, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 4096):
            written += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    return process.wait(), written.decode()


def test_elsewhere_the_lines_are_passed_on_and_the_answer_comes_last(checkout: Path) -> None:
    status, lines = passed_on(checkout, 0)
    assert status == 0
    assert "INFO chatter" in lines
    assert not any("lock file" in line for line in lines)
    assert "X is best." in lines
    assert lines.index("X is best.") > lines.index("Running stage 'report':")
    assert any("data/report/report.html" in line for line in lines)
    assert re.search(r"it took (1 second|\d+ seconds)\.", lines[-1]), "where 0.0 minutes stood"
    assert sorted(path.name for path in (checkout / "data").iterdir()) == ["report", "repro.log"]
    log = (checkout / "data" / "repro.log").read_text()
    assert "Updating lock file" in log
    assert re.search(r"^this run took \d+ seconds$", log, re.MULTILINE)
    assert (checkout / "data" / "repro.log").stat().st_mode & 0o077 == 0


def test_a_profile_too_closes_with_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its report is not in data/report, from which `make repro` took the answer."""
    (tmp_path / "answer.md").write_text("Y is best.\n")
    _close(Console(file=StringIO()), tmp_path, ["Compare        make experiments"])
    assert capsys.readouterr().err == "Y is best.\n\nCompare        make experiments\n"


@pytest.mark.parametrize("cause", ["error: data.path: is missing. Fix: give one.\n", ""])
def test_of_a_failed_stage_the_cause_comes_last(checkout: Path, cause: str) -> None:
    status, lines = passed_on(checkout, 255, cause)
    assert status == 2
    assert lines[-1] == (cause.strip() or "ERROR: failed to reproduce 'report'")
    assert not any("X is best" in line for line in lines)


def test_after_ctrl_c_the_status_is_the_shells(checkout: Path) -> None:
    assert passed_on(checkout, 252)[0] == 130


# DVC passes no signal on. The stage ends its step, and says how far it came, or nothing.
_DVC_WITH_A_STAGE = """
import subprocess, sys
sys.exit(subprocess.call(["/bin/sh", "-c", "sh '{root}/tasks/stage.sh' stepping"]))
"""
_STEPPING = """
import time
from dptune.core.interrupts import stop_request
try:
    with stop_request() as asked:
        print("begun", flush=True)
        while not asked():
            time.sleep(0.1)
        open("checkpoint", "w").close()
except KeyboardInterrupt:
    print({said!r})
"""


@pytest.mark.parametrize(
    ("whom", "said"),
    [*((whom, "stopped at release 3 of 9; run again to go on") for whom in ("repro", "repro twice", "dvc", "both")),
     ("repro", "bye")],
)  # fmt: skip
def test_sigterm_ends_dvc_and_its_stage_after_the_step(checkout: Path, whom: str, said: str) -> None:
    """`make`, `kill` and the end of a container send SIGTERM to the command alone, a batch system to all processes."""
    (checkout / "dvc" / "__main__.py").write_text(_DVC_WITH_A_STAGE.format(root=ROOT))
    (checkout / "stepping.py").write_text(_STEPPING.format(said=said))
    process = start(checkout, 0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    started = psutil.Process(process.pid).children(recursive=True)
    told = {"repro": [process], "repro twice": [process] * 2, "dvc": started[:1], "both": [process, *started]}
    for one in told[whom]:
        one.send_signal(signal.SIGTERM)
        time.sleep(0.004)  # while the first one is passed on, if there is a second
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 130
    assert lines[-1] == (said if said.startswith("stopped") else "stopped; run again to go on")
    assert psutil.wait_procs(started, timeout=240)[1] == []
    assert (checkout / "checkpoint").exists()


def test_a_terminal_shows_stages_and_meters_and_no_chatter(checkout: Path) -> None:
    status, written = at_a_terminal(checkout, 0)
    assert status == 0
    for shown in (
        "acquire",
        "nothing changed",
        "train",
        "2 of 3",
        "cell one",
        "3 of 4 steps",
        "WARNING odd",
        "X is best.",
    ):
        assert shown in written
    assert "chatter" not in written
    assert "chatter" in (checkout / "data" / "repro.log").read_text()


def test_a_terminal_shows_which_stage_failed(checkout: Path) -> None:
    status, written = at_a_terminal(checkout, 255, "error: x. Fix: y.\n")
    assert status == 2
    assert "\u2717" in written
    assert written.rstrip().endswith("error: x. Fix: y.")


def test_meters_of_other_processes_and_half_lines(tmp_path: Path) -> None:
    events = tmp_path / "events"
    whole = json.dumps({"meter": "1-0", "what": "a", "done": 1, "total": 2, "unit": "", "ended": False}) + "\n"
    events.write_text(whole + whole[:10])
    display = StageDisplay(Console(file=StringIO()), ["one"], events)
    assert len(display._new_events()) == 1
    with events.open("a") as file:
        file.write(whole[10:])
    assert len(display._new_events()) == 1
    assert display._new_events() == []


def test_a_meter_appends_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "events"
    events.touch()
    monkeypatch.setenv(EVENTS, str(events))
    with Meter("work", total=3, done=1, unit="rows"):
        pass
    first, last = (json.loads(line) for line in events.read_text().splitlines())
    assert (first["what"], first["done"], first["total"], first["ended"]) == ("work", 1, 3, False)
    assert last["ended"]
    assert last["meter"] == first["meter"]


def test_a_meter_outlives_its_events_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVENTS, str(tmp_path / "gone"))
    with Meter("work", total=1) as meter:
        meter.update(1)
    assert not (tmp_path / "gone").exists()


def test_no_stage_is_counted_that_is_not_there(tmp_path: Path) -> None:
    """Between stages and after the last one; "12 of 11" stood there once."""
    display = StageDisplay(Console(file=StringIO()), ["one", "two"], tmp_path / "events")

    def shown() -> str:
        display._update()
        return f"{display._progress.tasks[0].description}: {display._progress.tasks[0].fields['count']}"

    said = [shown()]
    for stage in ("one", "two"):
        display.enter(stage, runs=False)
        said.append(shown())
    assert said == ["starting: 0 of 2", "starting: 1 of 2", "ending: 2 of 2"]


def test_databases_are_made_whole_and_private(tmp_path: Path) -> None:
    """Beside the first stages, by a process of its own: a flow need not wait for the tables of its tools."""
    left_out = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    plain = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = plain | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "flows.databases"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for file, table in ((tmp_path / "home" / "prefect.db", "flow_run"), (tmp_path / "data" / "mlflow.db", "runs")):
        assert file.stat().st_mode & 0o777 == 0o600
        with closing(sqlite3.connect(file)) as database:
            assert database.execute(f"select count(*) from {table}").fetchall() == [(0,)]
