"""A run and a search never share a folder: each would leave its ledger, weights or certificate to the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_search import draws, killed, prepared, start, usual

from dptune.core.errors import ConfigError
from dptune.core.files import private_directory
from dptune.job import run as run_module
from dptune.job.run import run
from dptune.job.search import search as search_module
from dptune.job.search.search import search, working_folder
from dptune.job.search.settings import SearchSettings
from dptune.privacy.spent_budgets.register import Register


def state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_plain_run_is_refused_in_the_folder_of_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)
    register, plain = Register(tmp_path / "spent.jsonl"), prepared(scored=False)
    killed(monkeypatch, tmp_path)
    for _ in range(2):  # under way, then ended
        before = state(tmp_path)
        with pytest.raises(ConfigError, match="belongs to a search"):
            run(plain, tmp_path / "out", register)
        assert state(tmp_path) == before
        start(tmp_path)
    (tmp_path / "out" / "cell.json").unlink()
    with pytest.raises(ConfigError, match="belongs to a search"):
        run(plain, tmp_path / "out", register)


def test_a_search_is_refused_in_the_folder_of_a_plain_run(tmp_path: Path) -> None:
    register, plain = Register(tmp_path / "spent.jsonl"), prepared(scored=False)

    def stop(report: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plain, tmp_path / "out", register, on_step=stop)
    before = state(tmp_path)
    with pytest.raises(ConfigError, match="belongs to a run"):
        start(tmp_path)
    assert state(tmp_path) == before
    run(plain, tmp_path / "out", register)
    with pytest.raises(ConfigError, match="belongs to a run"):
        start(tmp_path)


def test_what_another_process_began_in_between_is_seen_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = Register(tmp_path / "spent.jsonl")

    def begun(kind: str) -> Callable[[Path], Path]:
        def begin(path: Path) -> Path:
            made = private_directory(path)
            (path / "cell.json").write_text(json.dumps({"kind": kind}))
            return made

        return begin

    monkeypatch.setattr(run_module, "private_directory", begun("search"))
    with pytest.raises(ConfigError, match="belongs to a search"):
        run(usual(), tmp_path / "run", register)
    monkeypatch.setattr(search_module, "private_directory", begun("run"))
    with pytest.raises(ConfigError, match="belongs to a run"):
        start(tmp_path)
    assert not register.path.exists()


def test_a_hidden_working_folder_alone_keeps_runs_out(tmp_path: Path) -> None:
    """Its result folder was removed; the search may go on, and would find a run there."""
    working_folder(tmp_path / "out").mkdir(0o700)
    with pytest.raises(ConfigError, match="belongs to a search"):
        run(usual(), tmp_path / "out", Register(tmp_path / "spent.jsonl"))
    assert not (tmp_path / "out").exists()


def test_the_folder_may_be_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    asked = SearchSettings.of({"space": {"learning_rate": [0.01, 0.02]}, "candidates": 2})
    found = search(usual(), asked, Path("."), Register(tmp_path / "spent.jsonl"))
    assert found.certificate is not None
    assert sorted(os.listdir(tmp_path)) == [".spent.jsonl.lock", "here", "spent.jsonl"]


def test_a_budget_that_is_too_small_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epsilon"):
        start(tmp_path, prepared(epsilon=1e-5))
    assert list(tmp_path.iterdir()) == []
