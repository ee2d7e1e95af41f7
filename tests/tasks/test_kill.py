"""``kill -9`` of the real process at random moments: the ledger never under-counts, and the cell ends finished."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from tiny_pipeline import BUDGET, UNITS, read_json, static

from dptune.privacy.calibration import sampling
from dptune.privacy.ledger_file import chain_after, read_ledger
from tasks.experiment.cells import Cell

KILLS = 5


# The cell's command, which waits for its end after so many noisy values: however late a kill comes, it is not done.
WAITING = """
import runpy, sys, threading
from dptune.mechanisms.mechanism import Mechanism

left, real = int(sys.argv.pop(1)), Mechanism.privatise

def privatise(*arguments):
    global left
    if left == 0:
        threading.Event().wait()
    left -= 1
    return real(*arguments)

Mechanism.privatise = privatise
runpy.run_module("tasks.experiment.finetune", run_name="__main__", alter_sys=True)
"""


def start(cell: Cell, most: int | None = None) -> subprocess.Popen[str]:
    """Run the cell, to its end or up to ``most`` more noisy values."""
    how = ["-m", "tasks.experiment.finetune"] if most is None else ["-c", WAITING, str(most)]
    command = [sys.executable, *how, str(cell.directory / "cell.json")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def charged(ledger: Path) -> int:
    """Whole lines but the first; a torn last one was never acknowledged."""
    return max(0, ledger.read_bytes().count(b'"kind":"release"')) if ledger.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_kills_and_a_finish(pipeline: Path) -> None:
    cell = static({"training": {"epochs": 40, "checkpoint_every": 3, "evaluate_every": 50}})
    steps, ledger = sampling(UNITS, 16, 40)[1], cell.directory / "ledger.jsonl"
    cell.directory.mkdir(parents=True)
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    moments = random.Random()
    counts = [0]
    for _ in range(KILLS):
        process = start(cell, steps // (KILLS + 1) - 1)
        while charged(ledger) <= counts[-1] and process.poll() is None:
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        output = process.communicate()[0]
        assert process.returncode == -signal.SIGKILL, f"it was not alive any more: {output}"
        assert charged(ledger) > counts[-1], output
        counts.append(charged(ledger))
        assert not (cell.directory / "result.json").exists()
    assert counts == sorted(set(counts))
    assert counts[-1] < steps
    process = start(cell)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    contents = read_ledger(ledger)
    assert contents.complete
    assert contents.releases == steps
    assert contents.epsilons.certified <= BUDGET
    assert chain_after(ledger, counts[-1]) is not None
    result = read_json(cell.directory / "result.json")
    assert result["releases"] == steps
    assert result["epsilon_certified"] == contents.epsilons.certified
    history = [(point["step"], point["releases"]) for point in result["history"]]
    assert all(step <= releases for step, releases in history), "steps in the weights never exceed what was charged"
    assert history[-1][1] == steps
    # Every kill lost the steps since a checkpoint, and their charges stayed.
    assert history[-1][0] <= steps
    assert (cell.directory / "adapter" / "adapter_model.safetensors").exists()
    assert not (cell.directory / "checkpoint.safetensors").exists()
    assert not list(cell.directory.rglob("*.partial"))
    assert f"{steps} of {steps} releases" in output
    verified = subprocess.run(
        [sys.executable, "-m", "dptune.cli", "verify", str(ledger)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0, verified.stderr


MANY, EVERY = 50, 3

# Imports once, then a process for each line of its input, so that fifty starts take no ten minutes.
FORKING = """
import os, signal, sys
from pathlib import Path
from dptune.mechanisms.mechanism import Mechanism
from tasks.experiment import finetune
from tasks.stage import run_stage

made = os.open("made", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
real = Mechanism.privatise

def privatise(*arguments):
    global left
    if left == 0:
        signal.pause()  # however late the kill comes, the cell is not done
    left -= 1
    os.write(made, b".")  # a noisy value comes to exist
    return real(*arguments)

Mechanism.privatise = privatise
for line in sys.stdin:
    left, _, path = line.strip().partition(" ")
    left = int(left)
    child = os.fork()
    if child == 0:
        run_stage(lambda: finetune.main([Path(path)]))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def saved(cell: Cell) -> tuple[int, int]:
    """Step and releases of the checkpoint."""
    path = cell.directory / "checkpoint.safetensors"
    if not path.exists():
        return 0, 0
    with safe_open(path, framework="pt") as file:
        progress = json.loads(file.metadata()["progress"])
    return progress["step"], progress["releases"]


def alive(process: int) -> bool:
    """Whether it has not ended; one whose end its parent has read is gone."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_and_a_finish(pipeline: Path) -> None:
    """No noisy value without its line, and at most the steps since a checkpoint lost at each kill."""
    cell = static({"training": {"epochs": 160, "checkpoint_every": EVERY, "evaluate_every": 5000}})
    steps, ledger = sampling(UNITS, 16, 160)[1], cell.directory / "ledger.jsonl"
    cell.directory.mkdir(parents=True)
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    moments, kills = random.Random(), 0
    starter = subprocess.Popen([sys.executable, "-c", FORKING], stdin=-1, stdout=-1, text=True)
    assert starter.stdin is not None
    assert starter.stdout is not None
    while kills < MANY:
        before = charged(ledger)
        print((steps - 100) // MANY - 1, cell.directory / "cell.json", file=starter.stdin, flush=True)
        process = int(starter.stdout.readline())
        # Some die while they open the run, some between two steps.
        wanted = before + moments.choice([0, 1, 2])
        while charged(ledger) < wanted and alive(process):
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        assert int(starter.stdout.readline()) == -signal.SIGKILL
        kills += 1
        made = Path("made").stat().st_size
        assert made <= charged(ledger), "a release is on no ledger"
        assert charged(ledger) - saved(cell)[1] <= EVERY, "more paid steps are lost than since a checkpoint"
    step, lost = saved(cell)[0], charged(ledger)
    print(steps, cell.directory / "cell.json", file=starter.stdin, flush=True)
    starter.stdout.readline()
    assert int(starter.stdout.readline()) == 0
    starter.stdin.close()
    assert starter.wait() == 0
    contents = read_ledger(ledger)
    assert contents.complete
    assert contents.releases == steps >= Path("made").stat().st_size
    assert contents.epsilons.certified <= BUDGET
    last = read_json(cell.directory / "result.json")["history"][-1]["step"]
    assert steps - (lost - step) <= last <= steps
    assert steps - last <= EVERY * MANY
    print(f"{kills} kills: {steps - last} of {steps} paid steps lost, {Path('made').stat().st_size} noisy values")
