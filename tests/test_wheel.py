"""The wheel: the library with all its files, nothing of the pipeline, and a command that works from any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

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
    environment = os.environ | {"PYTHONPATH": str(installed)}

    def said(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("-c", "import dptune; print(dptune.__file__)").startswith(str(installed))
    assert "account" in said("-m", "dptune.cli", "--help")
    assert "rldp_published: " in said("-m", "dptune.cli", "mechanisms")
    priced = "account static --delta 1e-5 --sample-rate 0.01 --steps 1000 --set noise_multiplier=1 --json"
    assert json.loads(said("-m", "dptune.cli", *priced.split()))["epsilon_certified"] == pytest.approx(1.83, abs=5e-3)
    assert not list(empty.iterdir())
