"""Every tutorial runs from its first cell to its last, as a reader would run it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(tutorial: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(tutorial, as_version=4)
    NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_tutorials_are_kept_without_what_they_printed() -> None:
    """Outputs would be numbers of another version, and a place for records to stay in."""
    assert TUTORIALS
    for tutorial in TUTORIALS:
        for cell in nbformat.read(tutorial, as_version=4).cells:
            assert not cell.get("outputs")
