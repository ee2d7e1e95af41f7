"""Set-up: what pip is told about packages reaches uv, and pip installs where uv cannot."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci" / "install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_are_true(install: ModuleType) -> None:
    failed, tried = doctest.testmod(install)
    assert tried == 2
    assert failed == 0


def played(install: ModuleType, monkeypatch: pytest.MonkeyPatch, settings: str, fails: str) -> tuple[int, list[str]]:
    """Exit status of the set-up, and the installers that it started; the one called ``fails`` fails."""
    started: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "config" in command:
            return subprocess.CompletedProcess(command, 0, settings, "")
        models = command[-2:] == install.MODELS
        pip = "models" if models else "pip"
        started.append("bootstrap" if command[-1] == "uv" else pip if "-m" in command else "uv")
        return subprocess.CompletedProcess(command, int(started[-1] == fails), "", "no such package")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install.os, "chdir", lambda folder: None)
    return install.main(), started


@pytest.mark.parametrize(
    ("settings", "fails", "started", "why"),
    [
        ("", "", ["bootstrap", "uv", "models"], ""),
        ("", "uv", ["bootstrap", "uv", "pip", "models"], "uv failed: no such package"),
        ("", "bootstrap", ["bootstrap", "pip", "models"], "pip finds no uv"),
        ("", "models", ["bootstrap", "uv", "models"], "README's first example needs them"),
        ("global.proxy='http://p'", "", ["pip", "models"], "pip's option 'proxy' is set"),
        ("global.cert='/c.pem'", "", ["bootstrap", "uv", "models"], ""),
    ],
)
def test_pip_installs_where_uv_cannot_and_one_line_says_why(
    install: ModuleType,
    settings: str,
    fails: str,
    started: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert played(install, monkeypatch, settings, fails) == (0, started)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(why)
    assert why in "".join(lines)


def test_a_failed_pip_fails_the_set_up(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert played(install, monkeypatch, "global.proxy='http://p'", "pip") == (1, ["pip"])
