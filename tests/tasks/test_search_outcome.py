"""Tests of what is kept of a run of a rehearsal once it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptune.errors import DptuneError
from dptune.files import private_directory, replacing, write_text
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.runs_within import FOLDER
from dptune.tuning.places import partial_of, weights_in
from tasks.search.outcome import FILE, forget_losers, forget_weights


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

    def run(name: str, *files: str) -> Path:
        folder = tmp_path / FOLDER / name
        for file in ("checkpoint.safetensors", "adapter/adapter_model.safetensors", *files):
            write_text(folder / file, "")
        return folder

    ended, aside = run("0a", "ledger.jsonl", FILE), run("0b.set-aside-1", "ledger.jsonl")
    begun, lost = run("0b", "ledger.jsonl"), run("0c", FILE)
    forget_losers(tmp_path, ended=False)
    assert [weights_in(one) for one in (ended, aside)] == [[], []]
    assert "of settings that were not chosen stay in it (0b, 0c)" in caplog.text
    assert [len(weights_in(one)) for one in (begun, lost)] == [2, 2]
    caplog.clear()
    forget_losers(tmp_path, ended=True)
    assert weights_in(begun) == []
    assert "of settings that were not chosen stay in it (0c)" in caplog.text
    write_text(lost / "ledger.jsonl", "")
    caplog.clear()
    forget_losers(tmp_path, ended=True)
    assert weights_in(lost) == []
    assert caplog.text == ""
