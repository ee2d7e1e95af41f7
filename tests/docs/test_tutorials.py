"""Every page that a newcomer follows runs from its first block to its last, and prints what it shows."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import yaml
from pages import DOCS, RUNNING, Reader, blocks, matches
from tiny_pipeline import BUDGET, cells

from tasks.experiment.finetune import run_cell

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which tiny.py was run."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(DOCS / "tutorials" / "tiny.py"), run_name="__main__")
    return folder


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    reader = Reader()
    for block in blocks(page.read_text(encoding="utf-8")):
        reader.run(block)


@pytest.mark.slow
def test_the_study_of_a_tutorial_trains(pipeline: Path) -> None:
    """Its entries on the tiny pipeline, at one epsilon and seed."""
    page = (DOCS / "tutorials" / "compare_mechanisms.md").read_text(encoding="utf-8")
    (study,) = [yaml.safe_load(block.code) for block in blocks(page) if block.language == "yaml"]
    grid = cells(study, {"experiment": {"epsilons": [BUDGET], "seeds": [0]}})
    assert [cell.mechanism for cell in grid] == ["static", "auto_s", "quantile"]
    for cell in grid:
        assert float(run_cell(cell, "cpu")["epsilon_certified"]) <= BUDGET


def test_what_is_shown_is_compared() -> None:
    assert matches("epsilon 3.99\n...\nend", "epsilon 3.99\nmore\nend\n", numbers=True)
    assert not matches("epsilon 3.99", "epsilon 4.01", numbers=True)
    assert matches("epsilon 3.99 of 4", "epsilon 1.0e-5 of 4", numbers=False)
    assert not matches("epsilon 3.99 spent", "epsilon 3.99", numbers=False)
