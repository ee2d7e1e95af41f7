"""An empty directory, and the ledgers that a test opens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_pipeline import keep_track_of_ledgers, prepare_environment

from dptune.privacy.ledger import Ledger


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: nothing in it."""
    prepare_environment(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ledger]]:
    """Every ledger that a test opens."""
    yield from keep_track_of_ledgers(monkeypatch)
