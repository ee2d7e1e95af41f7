"""A browser for all tests of this folder, which are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import built

from tests.browser.chromium import NAMES, chromium, executable
from tests.browser.real_pages import write_real_pages
from tests.browser.samples import write_pages


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium; without one, or without Playwright, the test is skipped.

    Not the session's: while it runs, so does an event loop in this thread, in which Prefect's functions are coroutines.
    """
    if find_spec("playwright") is None:
        pytest.skip("playwright is not installed: pip install 'dptune[dev]'")
    if executable() is None:
        pytest.skip(f"no browser on the path: {', '.join(NAMES)}")
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def real_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the pages of a search and of policies that were really run."""
    return write_real_pages(built(tmp_path_factory), tmp_path_factory.mktemp("real") / "pipeline")


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one page of each kind."""
    data = tmp_path_factory.mktemp("pages")
    write_pages(data)
    return data
