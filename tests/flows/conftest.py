"""The tiny pipeline with a Prefect server of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))

from tiny_pipeline import built, copied, prepare_environment


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Stages set it; other tests must not notice."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A Prefect server with an empty database; its API's address."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield str(PREFECT_API_URL.value())


@pytest.fixture
def pipeline(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a copy of the built pipeline, in a path with a space."""
    directory = copied(built(tmp_path_factory), tmp_path / "tiny pipeline")
    prepare_environment(monkeypatch, directory)
    return directory
