"""Settings and fixtures shared by every test."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import settings

from dptune.privacy.ledger import Ledger

# Helpers that tests of other parts use too.
sys.path[:0] = [
    str(Path(__file__).parent / part) for part in ("tasks", "training", "mechanisms", "policy", "prediction", "job")
]

# Two cores under load: a deadline would only measure the neighbours.
# The same examples in every run, so that what fails fails again; HYPOTHESIS_PROFILE=explore looks at many new ones.
settings.register_profile("dptune", deadline=None, max_examples=40, database=None, print_blob=True, derandomize=True)
settings.register_profile("explore", settings.get_profile("dptune"), max_examples=400, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dptune"))

# typer builds the whole command line for each command that a test runs: 33 ms, where most commands take 4.
typer.main.get_command = typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]


def _check_descriptor(descriptor: int) -> None:
    """Take the place of os.fsync: no test cuts the power, and waiting for the disk took a tenth of the tests' time.

    Tests of what is synced, and in which order, put a function of their own here; processes that tests start do sync.
    """
    os.fstat(descriptor)


os.fsync = _check_descriptor  # type: ignore[assignment]

# MLflow's and Prefect's databases wait for the disk at every commit; files in memory spare them that. Not where it is
# small, or where no program may be run from it, as in many containers: tests write programs.
_MEMORY = Path("/dev/shm")
_RUNS_PROGRAMS = os.access(_MEMORY, os.W_OK) and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC
if _RUNS_PROGRAMS and shutil.disk_usage(_MEMORY).free > 8 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# Started in the background of a script, this process ignores Ctrl-C, and so would those that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case of long bytes by its argument: an archive holds the time, and workers must collect equal names."""
    return argname if isinstance(val, bytes) and len(val) > 16 else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Iterator[Any]:
    """Mark as long every case of a ``one_case`` test but the first one, or but those that the mark names.

    Raises: CollectError for a name that none of the cases has: the case that it meant would be long in silence.
    """
    made = yield
    items = made if isinstance(made, list) else []
    if not items or not (mark := items[0].get_closest_marker("one_case")):
        return made
    cases = [item.name.partition("[")[2].removesuffix("]") for item in items]
    if unknown := [name for name in mark.args if name not in cases]:
        names, present = ", ".join(map(repr, unknown)), ", ".join(cases)
        raise collector.CollectError(f"one_case of {items[0].originalname} names {names}; its cases are {present}")
    for item, case in zip(items, cases, strict=True):
        if case not in (mark.args or cases[:1]):
            item.add_marker(pytest.mark.long)
    return made


def pytest_collection_finish() -> None:
    """Leave what was imported to collect the tests out of garbage collection, which would walk it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests and the code under them leave in the temporary folder lies in pytest's, which keeps the last run's."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("scratch"))
    yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Stages set it; other tests must not notice."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture
def pipeline(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Path:
    """The current directory: a copy of the built pipeline, in a path with a space.

    Cells draw their curves only in tests that have "curves" in their names.
    """
    from tiny_pipeline import built, copied, prepare_environment, quick_pictures

    directory = copied(built(tmp_path_factory), tmp_path / "tiny pipeline")
    prepare_environment(monkeypatch, directory)
    if "curves" not in request.node.name:
        quick_pictures(monkeypatch)
    return directory


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ledger]]:
    """Every ledger that a test opens; a dead process holds no lock, so a test closes them where it plays dead."""
    ledgers: list[Ledger] = []
    real = Ledger.__init__

    def init(self: Ledger, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        ledgers.append(self)

    monkeypatch.setattr(Ledger, "__init__", init)
    yield ledgers
    for ledger in ledgers:
        ledger.close()
