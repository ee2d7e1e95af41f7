"""The wheel: the library with all its files, nothing of the pipeline, and a command that works from any folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.forked import command, forked

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for the build leaves folders beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("dptune", "tasks", "flows"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("dptune-*.whl")
    return built


def test_it_holds_every_file_of_the_library_and_nothing_else(wheel: Path) -> None:
    files = (path for path in (ROOT / "dptune").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    library = {path.relative_to(ROOT).as_posix() for path in files}
    with ZipFile(wheel) as opened:
        names = set(opened.namelist())
        (about,) = {name.partition("/")[0] for name in names} - {"dptune"}
        assert about.endswith(".dist-info")
        assert "dptune = dptune.cli:app" in opened.read(f"{about}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(about)} == library


def test_its_commands_work_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    with ZipFile(wheel) as opened:
        opened.extractall(installed)

    def said(work: Callable[[], None]) -> str:
        status, output, errors = forked(work, empty, packages=installed)
        assert status == 0, errors
        return output

    assert said(lambda: print(import_module("dptune").__file__)).startswith(str(installed))
    assert "account" in said(command("dptune.cli", "--help"))
    assert "rldp_published: " in said(command("dptune.cli", "mechanisms"))
    priced = "account static --delta 1e-5 --sample-rate 0.01 --steps 1000 --set noise_multiplier=1 --json"
    found = json.loads(said(command("dptune.cli", *priced.split())))
    assert found["epsilon_certified"] == pytest.approx(1.83, abs=5e-3)
    assert not list(empty.iterdir())
