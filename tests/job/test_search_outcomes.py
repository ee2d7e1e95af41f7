"""Each candidate of a search is a run of its own, and its outcome is on disk before its ledger ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_search import draws, outcomes, start

from dptune.core.errors import FullDeviceError
from dptune.job.search import candidates as module
from dptune.job.search.plan import Journal, Plan
from dptune.job.search.search import working_folder
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import is_complete, read_ledger

pytestmark = pytest.mark.long


def test_no_two_candidates_have_one_run_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run id alone tells apart the ledgers of two candidates with equal settings.

    With one id for all, a loser's ledger would pass for the winner's, and a register, which knows runs by their ids,
    would count several of them as one.
    """
    draws(monkeypatch, 3)
    found = start(tmp_path, score="public", keep_losers=True)
    working = working_folder(tmp_path / "out")
    names = [one.name for one in Plan.read(working).candidates]
    ledgers = [read_ledger(working / "candidates" / name / "ledger.jsonl") for name in names]
    assert [ledger.header.run_id for ledger in ledgers] == names
    assert len({ledger.chain for ledger in ledgers}) == len({*names}) == 3
    assert found.ledger.header.run_id in names


def test_a_candidates_outcome_is_on_disk_before_its_ledger_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate whose ledger has ended is not run again, so its score must be there by then.

    Killed between the two in the other order, it would have ended without a score, and could never be compared.
    """
    draws(monkeypatch, 2)
    candidates = working_folder(tmp_path / "out") / "candidates"

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "end", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, score="public")
    assert [is_complete(path) for path in candidates.glob("*/ledger.jsonl")] == [False, False]
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, score="public")
    ((first, known),) = outcomes(tmp_path / "out").items()
    found = start(tmp_path, score="public", keep_losers=True)
    ended = outcomes(tmp_path / "out")
    assert ended[first] == known
    scores = [one["score"] for one in ended.values()]
    assert found.certificate is not None
    assert found.certificate.winner is not None
    assert len(scores) == 2
    assert found.certificate.winner.score == max(scores)


@pytest.mark.parametrize("place", ["train", "write_weights"])
def test_a_full_gpu_is_no_candidates_failure(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training or at its end: scored worst, a candidate would be lost for what another process holds."""
    draws(monkeypatch, 2)

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.20 GiB.")

    with monkeypatch.context() as patched:
        patched.setattr(module, place, full)
        patched.setattr(module, "train_together", full)
        with pytest.raises(FullDeviceError) as caught:
            start(tmp_path, score="public")
    assert "GiB" not in str(caught.value)
    assert not outcomes(tmp_path / "out")
    assert start(tmp_path, score="public").ledger.complete
