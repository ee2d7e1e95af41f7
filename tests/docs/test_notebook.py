"""The notebook of the tutorials runs from its first cell to its last, and prints what it shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from pages import DOCS, matches

pytestmark = pytest.mark.system

NOTEBOOK = DOCS / "tutorials" / "own_table.ipynb"


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    """What a cell printed, and the text of its value."""
    texts = [one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout"]
    return "".join(texts + [one.data["text/plain"] for one in cell.outputs if one.output_type == "execute_result"])


def run(notebook: Any, folder: Path) -> Any:
    """The notebook with the output of a run in ``folder``."""
    return NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What lies beside the notebook; the kernel keeps its files here too."""
    shutil.copy(NOTEBOOK.with_name("tiny.py"), tmp_path)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name).mkdir()
    return tmp_path


def test_the_notebook_runs_and_prints_what_it_shows(folder: Path) -> None:
    shown = cells(nbformat.read(NOTEBOOK, as_version=4))
    ran = cells(run(nbformat.read(NOTEBOOK, as_version=4), folder))
    assert any("certified epsilon 4.000" in printed(cell) for cell in ran)
    for number, (one, other) in enumerate(zip(shown, ran, strict=True)):
        if "generate(" not in one.source:  # words follow the noise
            assert matches(printed(one), printed(other), numbers=False), f"cell {number}: {printed(other)}"


def test_a_cell_that_fails_is_noticed(folder: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells(notebook)[1].source = 'pd.read_csv("absent.csv")'
    with pytest.raises(CellExecutionError):
        run(notebook, folder)
