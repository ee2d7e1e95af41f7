"""The tiny pipeline as fixtures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_pipeline import built, copied, keep_track_of_ledgers, prepare_environment

from dptune.privacy.ledger import Ledger


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Stages set it; other tests must not notice."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def pipeline(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a copy of the built pipeline, in a path with a space."""
    directory = copied(built(tmp_path_factory), tmp_path / "tiny pipeline")
    prepare_environment(monkeypatch, directory)
    return directory


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: nothing in it."""
    prepare_environment(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ledger]]:
    """Every ledger that a test opens."""
    yield from keep_track_of_ledgers(monkeypatch)
