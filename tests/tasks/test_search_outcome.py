"""Tests of what is kept of a run of a rehearsal once it has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import DptuneError
from dptune.core.files import private_directory, replacing, write_json, write_text
from dptune.job.delivery.weights import partial_of, weights_in
from dptune.privacy.ledger import Ledger
from dptune.privacy.release import Release
from dptune.privacy.run_folder import FOLDER, RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.register import Register
from tasks.search import ranking
from tasks.search.ranking import FILE, forget_losers, forget_weights


def test_no_weights_stay_and_the_ledger_does(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.adapter, partial_of(folder)):
        write_text(path / "adapter_model.safetensors", "weights")
    for path in (folder.checkpoint, folder.ledger):
        path.write_bytes(b"")
    with replacing(folder.checkpoint) as half:
        name = half.name
    (tmp_path / name).write_bytes(b"weights of a run that was killed while it wrote them")
    forget_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder.ledger.name]


@pytest.mark.parametrize("name", ["adapter", ".adapter.partial", "checkpoint.safetensors"])
def test_weights_behind_a_link_are_not_called_removed(tmp_path: Path, name: str) -> None:
    """Also where the link leads to nothing now: it may be a disk that is not mounted."""
    run, elsewhere = private_directory(tmp_path / "run"), tmp_path / "elsewhere"
    (run / name).symlink_to(elsewhere)
    for leads in (False, True):
        if leads:
            write_text(elsewhere / "weights" if "adapter" in name else elsewhere, "of a loser")
        with pytest.raises(DptuneError, match=rf"{name}: is a link, and the weights behind it were not removed"):
            forget_weights(run)
        assert (run / name).is_symlink()
    (run / name).unlink()
    forget_weights(run)


def test_weights_of_losers_go_or_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of a run that is to go on stay, and those that alone witness what a lost ledger would tell."""
    ended, aside = run_in(tmp_path, "0a", FILE), run_in(tmp_path, "0b.set-aside-1")
    begun, lost = run_in(tmp_path, "0b"), run_in(tmp_path, "0c", FILE)
    kept = RunFolder(lost).ledger.read_bytes()
    RunFolder(lost).ledger.unlink()
    forget_losers(tmp_path, ended=False)
    assert [weights_in(one) for one in (ended, aside)] == [[], []]
    assert "of settings that were not chosen stay in it (0b, 0c)" in caplog.text
    assert [len(weights_in(one)) for one in (begun, lost)] == [2, 2]
    caplog.clear()
    forget_losers(tmp_path, ended=True)
    assert weights_in(begun) == []
    assert "of settings that were not chosen stay in it (0c)" in caplog.text
    RunFolder(lost).ledger.write_bytes(kept)
    caplog.clear()
    forget_losers(tmp_path, ended=True)
    assert weights_in(lost) == []
    assert caplog.text == ""


def cut(run: RunFolder) -> None:
    """Its result relies on two releases, and the ledger has one."""
    write_json(run.result, {"releases": 2})


def damaged(run: RunFolder) -> None:
    run.ledger.write_bytes(run.ledger.read_bytes().replace(b"static", b"statik"))


def emptied(run: RunFolder) -> None:
    run.ledger.write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, damaged, emptied])
def test_weights_stay_where_the_ledger_does_not_tell_what_they_cost(
    tmp_path: Path, harm: Callable[[RunFolder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, "0a", FILE)
    harm(RunFolder(run))
    monkeypatch.setattr(ranking, "figure_of", lambda prepared, out, work: 3.0)
    prepared: Any = None
    assert ranking._held_out(prepared, run, Register(tmp_path / "spent.jsonl")) == 3
    forget_losers(tmp_path, ended=True)
    assert len(weights_in(run)) == 2


def run_in(winner: Path, name: str, *files: str) -> Path:
    """A run that checks the ranking of a winner: one release, weights, a checkpoint, and these files."""
    folder = winner / FOLDER / name
    for file in ("checkpoint.safetensors", "adapter/adapter_model.safetensors", *files):
        write_text(folder / file, "a stand-in")
    header = RunHeader("static", "gdp_clt", "certified", None, 1e-6, "record", 10)
    with Ledger.create(RunFolder(folder).ledger, header, Counter()) as ledger:
        ledger.charge(Release(1.0, 4.0))
    return folder
