"""The real command: torchrun starts two processes of one cell on this machine's CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_pipeline import STEPS, read_json, static

from dptune.privacy.ledger_file import read_ledger
from tasks.experiment.cells import Cell
from tasks.experiment.finetune import run_cell

pytestmark = pytest.mark.system


def start(cell: Cell) -> subprocess.CompletedProcess[str]:
    """One node, two processes; ``--standalone`` finds a free port by itself."""
    cell.directory.mkdir(parents=True, exist_ok=True)
    (cell.directory / "cell.json").write_text(cell.model_dump_json())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tasks.experiment.finetune", str(cell.directory / "cell.json")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_cell_in_two_processes(pipeline: Path) -> None:
    cell = static()
    ended = start(cell)
    assert ended.returncode == 0, ended.stderr
    contents, result = read_ledger(cell.directory / "ledger.jsonl"), read_json(cell.directory / "result.json")
    assert contents.complete
    assert contents.releases == result["releases"] == STEPS
    assert result["device"] == "2 ranks, this one on cpu"
    assert result["epsilon_certified"] == contents.epsilons.certified
    assert (cell.directory / "adapter" / "adapter_model.safetensors").exists()
    assert ended.stdout.count("releases") <= 1 + STEPS, "one rank reports"
    assert run_cell(cell, "cpu")["adapter_sha256"] == result["adapter_sha256"], "it is finished for one process too"


@pytest.mark.slow
def test_a_finished_cell_is_no_error_for_ranks_that_find_nothing_to_do(pipeline: Path) -> None:
    cell = static()
    first = run_cell(cell, "cpu")
    ended = start(cell)
    assert ended.returncode == 0, ended.stderr
    assert run_cell(cell, "cpu") == first


@pytest.mark.slow
def test_what_one_rank_refuses_ends_the_command_with_its_message(pipeline: Path) -> None:
    cell = static().model_copy(update={"inputs": {}})
    ended = start(cell)
    assert ended.returncode != 0
    assert "cell.inputs" in ended.stderr
    assert not (cell.directory / "ledger.jsonl").exists()
