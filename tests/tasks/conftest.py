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
