"""An empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pipeline import prepare_environment


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: nothing in it."""
    prepare_environment(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and the program of charts are stand-ins, for tests of what pages say."""
    for module in ("experiment", "policy", "prediction"):
        monkeypatch.setattr(f"tasks.report.{module}.save", lambda _, path: path.write_bytes(b"picture"))
    monkeypatch.setattr("tasks.report.page.program", lambda: "")
