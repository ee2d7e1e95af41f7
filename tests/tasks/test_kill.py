"""``kill -9`` of the real process at random moments: the ledger never under-counts, and the cell ends finished."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_pipeline import BUDGET, UNITS, read_json, static

from dptune.privacy.calibration import sampling
from dptune.privacy.ledger import chain_after, read_ledger
from tasks.cells import Cell

KILLS = 5


def start(cell: Cell) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tasks.finetune", str(cell.directory / "cell.json")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def charged(ledger: Path) -> int:
    """Whole lines but the first; a torn last one was never acknowledged."""
    return max(0, ledger.read_bytes().count(b'"kind":"release"')) if ledger.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_kills_and_a_finish(pipeline: Path) -> None:
    cell = static({"training": {"epochs": 40, "checkpoint_every": 3, "evaluate_every": 50}})
    steps, ledger = sampling(UNITS, 16, 40)[1], cell.directory / "ledger.jsonl"
    cell.directory.mkdir(parents=True)
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    moments = random.Random()
    counts = [0]
    for _ in range(KILLS):
        process = start(cell)
        deadline = time.monotonic() + 120
        while charged(ledger) <= counts[-1] and process.poll() is None and time.monotonic() < deadline:
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
    output = process.communicate(timeout=400)[0]
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
