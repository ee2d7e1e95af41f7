"""A full disk: found before anything is charged, said with the file's name, and no step lost twice."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from test_resume import STEPS, run
from tiny_models import release_lines

from dptune.core.files import naming, write_text
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_folder import spending_of
from dptune.training import checkpoints
from tasks.stage import run_stage


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it: from then on no checkpoint after the ``taken`` next ones fits on the disk."""

    def fill(taken: int) -> None:
        real, left = checkpoints.save_file, iter(range(taken))

        def save(tensors: Any, path: Path, **more: Any) -> None:
            if next(left, None) is None:
                path.write_bytes(b"half")
                raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
            real(tensors, path, **more)

        monkeypatch.setattr(checkpoints, "save_file", save)

    return fill


def test_it_is_found_before_the_first_charge(tmp_path: Path, full: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full(0)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left") as caught:
            run(tmp_path)
        assert caught.value.filename == str(tmp_path / "checkpoint.safetensors")
        assert release_lines(tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]
    monkeypatch.undo()
    assert run(tmp_path)[1].releases == STEPS


def test_new_tries_on_a_full_disk_cost_nothing_more(
    tmp_path: Path, full: Any, monkeypatch: pytest.MonkeyPatch, opened: list[Ledger]
) -> None:
    full(2)
    for _ in range(4):
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path)
    assert release_lines(tmp_path) == 4, "the second checkpoint of a step failed, and no retry got as far as a charge"
    monkeypatch.undo()
    assert run(tmp_path)[1].releases == STEPS


def test_the_checkpoint_of_a_run_that_charged_nothing_has_no_price(
    tmp_path: Path, full: Any, opened: list[Ledger]
) -> None:
    """It exists before the first charge; a run that is set aside then has released nothing."""

    class Stopped(BaseException):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", lambda *_: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run(tmp_path)
    checkpoint = tmp_path / "checkpoint.safetensors"
    assert checkpoint.exists()
    assert spending_of(tmp_path) is None
    run(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    spent = spending_of(tmp_path)
    assert spent is not None
    assert spent.epsilon == float("inf"), "a checkpoint of releases whose lines are gone"
    checkpoint.write_bytes(b"damaged")
    assert spending_of(tmp_path) == spent


def test_a_stage_names_the_file_and_ends_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file where a folder should be")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_stage(lambda: write_text(tmp_path / "taken" / "file", "x"))
    assert ended.value.code == 2
    assert f"error: {tmp_path / 'taken'}" in capsys.readouterr().err


def test_a_file_that_grows_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, naming(tmp_path / "history.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write raises it: without a name
    assert caught.value.filename == str(tmp_path / "history.jsonl")
    with pytest.raises(OSError, match="No space left") as caught, naming(tmp_path):
        raise Exception("No space left on device (os error 28)")  # as tokenizers raises it
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(ValueError, match="other"), naming(tmp_path):
        raise ValueError("other")
