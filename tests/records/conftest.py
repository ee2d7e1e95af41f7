"""The real benchmark files, for tests of this folder that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def benchmarks() -> Path:
    """The folder of the real data sets."""
    place = os.environ.get("DPTUNE_BENCHMARKS")
    if not place or not Path(place).is_dir():
        pytest.skip("DPTUNE_BENCHMARKS names no folder with e2e, sst2 and wikitext2")
    return Path(place)
