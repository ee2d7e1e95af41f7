"""A search that is killed between the charge of a score and its outcome loses no candidate and pays once.

Real processes and real signals. The command waits at a chosen place, and the test looks at its files to see that it is
there: no clock decides what was written.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import checkpoint, rows, write_csv

from dptune.job.search.search import working_folder
from dptune.privacy.ledger_file import read_ledger

#: The command, which waits for its end before the first score's ledger ends, or before the score is drawn.
_WAITING = """
import sys, threading
from dptune.job.search import candidates
from dptune.privacy.ledger import Ledger

where, finish = sys.argv.pop(1), Ledger.finish

def wait(*_):
    threading.Event().wait()

if where == "unended":
    Ledger.finish = lambda ledger: wait() if ledger.path.name == "score.jsonl" else finish(ledger)
else:
    candidates.noisy_score = wait
from dptune.cli import app
app()
"""
#: What the score's ledger holds at each place.
_PROGRESS = {"unended": b'"kind":"release"', "undrawn": b'"kind":"end"'}


def command(folder: Path, *before: str) -> list[str]:
    paths = ["--model", str(checkpoint()), "--data", str(folder / "records.csv")]
    paths += ["--search", str(folder / "space.yaml"), "--out", str(folder / "out")]
    given = "--unit customer_id --epsilon 8 --delta 0.001 --epochs 1 --expected-batch-size 8 --rank 2 --eval-share 0.2"
    return [sys.executable, *before, "tune", *paths, *given.split(), "--target-modules", "c_attn"]


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = (working_folder(folder / "out") / "candidates.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def arrives(process: subprocess.Popen[str], folder: Path, content: bytes) -> None:
    """Wait until a score's ledger holds ``content``."""
    ledgers = "candidates/*/score.jsonl"
    while not any(content in one.read_bytes() for one in working_folder(folder / "out").glob(ledgers)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("where", _PROGRESS)
def test_a_search_goes_on_after_a_signal(where: str, number: signal.Signals, tmp_path: Path) -> None:
    write_csv(tmp_path / "records.csv", rows(60, 30))
    space = "space: {learning_rate: {log_uniform: [0.001, 0.05]}}\ncandidates: 2\nscore: {on: held_out}\n"
    space += "keep_losers: true\n"
    (tmp_path / "space.yaml").write_text(space)
    waiting = command(tmp_path, "-c", _WAITING, where)
    with subprocess.Popen(waiting, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        arrives(process, tmp_path, _PROGRESS[where])
        process.send_signal(number)
        said = process.communicate()[0]
    assert process.returncode == (-number if number == signal.SIGKILL else 130), said
    (kept,) = (line for line in journal(tmp_path) if "noise" in line)
    assert not [line for line in journal(tmp_path) if "outcome" in line]
    done = subprocess.run(command(tmp_path, "-m", "dptune"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = journal(tmp_path)
    assert [line for line in lines if "noise" in line and line["candidate"] == kept["candidate"]] == [kept]
    began = [line["candidate"] for line in lines if "begun" in line]
    ended = {line["candidate"]: line["outcome"] for line in lines if "outcome" in line}
    assert sorted(began) == sorted(ended), "every candidate has an outcome, once"
    assert all(outcome["score"] is not None for outcome in ended.values()), "none is lost"
    score = read_ledger(tmp_path / "out" / "adapter" / "score.jsonl")
    assert (score.complete, score.releases) == (True, 1)
    assert len((tmp_path / "spent.jsonl").read_text().splitlines()) == 2, "its head, and one search"
