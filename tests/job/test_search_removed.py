"""What is removed from a stopped search: no candidate is drawn again, and nothing is paid twice, in silence."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from staged_search import Staged
from tiny_search import draws, killed, outcomes, start

from dptune.core.errors import DptuneError
from dptune.core.files import sha256
from dptune.job.delivery.verification import CardError
from dptune.job.search import candidates as candidates_module
from dptune.job.search import search as search_module
from dptune.job.search.plan import JOURNAL, Journal, LostError
from dptune.job.search.search import working_folder
from dptune.privacy.run_folder import spending_of
from dptune.privacy.spent_budgets.register import Register


def places(folder: Path) -> list[Path]:
    """Every file and folder of a search, relative to the folder that holds it; the register is another matter."""
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    return [path for path in sorted(found) if not path.name.startswith((".spent", "spent")) and path.name != "lock"]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def charged(working: Path) -> int:
    """Number of releases in the ledgers of all candidates."""
    return sum(path.read_bytes().count(b'"kind":"release"') for path in working.glob("candidates/*/ledger.jsonl"))


def damages(folder: Path, kept: Path) -> Iterator[Path]:
    """Make the folder what it was in ``kept`` but for one file or folder; yield its name, and begin anew."""
    for place in places(kept):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        remove(folder / place)
        yield place


@pytest.mark.long
def test_a_candidate_goes_on_from_what_is_kept_or_the_search_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and folder is removed in turn, at each kind of moment at which the process may have died."""
    (folder := tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        whole = Staged(folder, patch, 2, 0, "", [], together=2)
        whole.start()
    most = whole.events.count("before charge")
    moments = sorted({whole.events.index(name) + 1 for name in whole.events} | {len(whole.events) // 2})
    refused: list[str] = []
    for moment in moments:
        shutil.rmtree(folder)
        folder.mkdir()
        with monkeypatch.context() as patch:
            stopped = Staged(folder, patch, 2, 0, "", [], together=2, kill_at=moment)
            with pytest.raises(KeyboardInterrupt):
                stopped.start()
            stopped.kill_at = 0
            kept = tmp_path / str(moment)
            shutil.copytree(folder, kept)
            before, ended = charged(working_folder(kept / "out")), outcomes(kept / "out")
            for removed in damages(folder, kept):
                stopped.events = []
                try:
                    stopped.start()
                except DptuneError as error:
                    refused.append(str(error))
                else:
                    lost = kept / removed.parent / "ledger.jsonl"
                    if removed.name == "checkpoint.safetensors" and removed.parent.name not in ended:
                        assert b'"kind":"release"' not in lost.read_bytes(), (moment, removed)  # it made weights
                    # Drawn again, a candidate repeats releases; its new ledger is byte for byte the old one.
                    assert before + stopped.events.count("before charge") == most, (moment, removed)
                    assert ended.items() <= outcomes(folder / "out").items(), (moment, removed)
                (total,) = Register(folder / "spent.jsonl").totals()
                assert total.entries == 1, (moment, removed)
    assert len(refused) > len(moments)
    assert all(". Fix: " in one for one in refused)


@pytest.mark.parametrize("moment", ["after save", "after finish"])
def test_a_journal_that_lost_its_last_lines_is_shown_by_the_ledgers(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that made a release has begun, and one whose ledger has ended has an outcome."""
    (folder := tmp_path / "whole").mkdir()
    with monkeypatch.context() as patch:
        whole = Staged(folder, patch, 2, 0, "", [], together=2)
        whole.start()
    place = len(whole.events) - whole.events[::-1].index(moment)
    (folder := tmp_path / "run").mkdir()
    with monkeypatch.context() as patch:
        stopped = Staged(folder, patch, 2, 0, "", [], together=2, kill_at=place)
        with pytest.raises(KeyboardInterrupt):
            stopped.start()
        stopped.kill_at = 0
        journal = working_folder(folder / "out") / JOURNAL
        lines = journal.read_bytes().splitlines(keepends=True)
        kept = 1 if moment == "after save" else next(at for at, line in enumerate(lines) if b"outcome" in line)
        journal.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(LostError, match="lacks lines about"):
            stopped.start()


def test_a_winner_is_delivered_with_all_its_files_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    (folder := tmp_path / "run").mkdir()

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "best_of", die)
        with pytest.raises(KeyboardInterrupt):
            start(folder)
    ((_, outcome),) = outcomes(folder / "out").items()
    assert "adapter_model.safetensors" in outcome["files"]
    shutil.copytree(folder, kept := tmp_path / "kept")
    delivered, refused = [], []
    for removed in damages(folder, kept):
        try:
            start(folder)
        except DptuneError as error:
            refused.append(str(error))
            continue
        delivered.append(removed.name)
        for file, digest in outcome["files"].items():
            assert sha256(folder / "out" / "adapter" / file) == digest, removed
    assert all(". Fix: " in one for one in refused)
    assert sorted(delivered) == sorted(["cell.json", "booking.json", "out", "checkpoint.safetensors"])


@pytest.mark.parametrize("removed", ["last line of the journal", "score.jsonl"])
def test_the_noise_of_a_charged_score_is_never_drawn_again(
    removed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    seen: list[float] = []
    noisy = candidates_module.noisy_score

    def look(*given: Any) -> float:
        seen.append(given[3])
        return noisy(*given)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(candidates_module, "noisy_score", look)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "end", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    if removed == "score.jsonl":
        (path,) = tmp_path.rglob(removed)
        path.unlink()
        start(tmp_path)
    else:
        (journal,) = tmp_path.rglob("candidates.jsonl")
        lines = journal.read_bytes().splitlines(keepends=True)
        assert b'"noise"' in lines[-1]
        journal.write_bytes(b"".join(lines[:-1]))
        with pytest.raises(LostError, match="another draw"):
            start(tmp_path)
    assert len({*seen}) == 1


def test_a_search_whose_secret_folder_was_removed_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with ``again``, by which another search may add to what was paid."""
    draws(monkeypatch, 1)
    shutil.rmtree(killed(monkeypatch, tmp_path))
    with pytest.raises(LostError, match="a search began here"):
        start(tmp_path, again=True)
    assert [total.entries for total in Register(tmp_path / "spent.jsonl").totals()] == [1]
    cost = spending_of(tmp_path / "out")
    assert cost is not None
    assert "certificate" in cost.problem


def test_a_winner_whose_files_are_others_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a loser would be another selection, and one byte is as good as all."""
    draws(monkeypatch, 1)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "best_of", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    ((_, outcome),) = outcomes(tmp_path / "out").items()
    for name in outcome["files"]:
        (path,) = working_folder(tmp_path / "out").rglob(name)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(LostError, match=rf"{re.escape(name)}: is missing, or another than the winner's"):
            start(tmp_path)
        path.write_bytes(whole)
        assert not (tmp_path / "out" / "adapter").exists()
    assert start(tmp_path).ledger.complete


@pytest.mark.parametrize("found", ["cell", "candidate", "both"])
def test_a_search_that_lost_plan_and_certificate_is_not_begun_again(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it, its cell or a candidate that began, shows that it was under way."""
    draws(monkeypatch, 1)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if found != "cell":
            patch.setattr(candidates_module, "_finish", die)
        else:
            patch.setattr(search_module, "run_candidates", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    working, cell = working_folder(tmp_path / "out"), tmp_path / "out" / "cell.json"
    (working / "plan.json").unlink()
    (working / "certificate.jsonl").unlink()
    if found == "candidate":
        cell.unlink()
    ledgers = {path: path.read_bytes() for path in working.glob("candidates/*/ledger.jsonl")}
    assert (found == "cell") == (not ledgers)
    with pytest.raises(LostError, match=r"plan\.json: is missing, and a search began here"):
        start(tmp_path, again=True)
    assert {path: path.read_bytes() for path in working.glob("candidates/*/ledger.jsonl")} == ledgers
    assert not (working / "plan.json").exists()
    assert [total.entries for total in Register(tmp_path / "spent.jsonl").totals()] == [1]


@pytest.mark.parametrize("fails", ["write", "part", "fsync"])
def test_a_line_that_the_disk_refuses_leaves_nothing_of_it_in_the_journal(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or in part on a full disk, it would join the next line, or count for an outcome that nobody was told of."""
    journal = Journal.create(tmp_path, "id")
    journal.begin("a")
    path, real = tmp_path / JOURNAL, os.write
    before = path.read_bytes()

    def write(descriptor: int, line: bytes) -> int:
        if fails == "write":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, line[:9] if fails == "part" else line)

    def fsync(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        if fails == "fsync":
            patch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match=JOURNAL):
            journal.end("a", 1.5, "")
    assert path.read_bytes() == before
    assert not journal.outcomes
    journal.end("a", 2.5, "")
    assert Journal(tmp_path, "id").outcomes == {"a": {"score": 2.5, "why": "", "files": {}}}


def test_a_winner_that_does_not_match_its_card_keeps_all_that_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is at its place the rest goes, and what nobody accepts could not be made again."""
    draws(monkeypatch, 1)
    deliver = search_module.deliver

    def spoil(folder: Any, result: Any) -> None:
        deliver(folder, result)
        weights = folder.adapter / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes() + b" ")

    with monkeypatch.context() as patch:
        patch.setattr(search_module, "deliver", spoil)
        with pytest.raises(CardError, match="other weights"):
            start(tmp_path)
    assert not (tmp_path / "out" / "adapter").exists()
    (weights,) = working_folder(tmp_path / "out").rglob("adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert start(tmp_path).ledger.complete


def test_a_journal_that_was_cut_or_edited_is_refused(tmp_path: Path) -> None:
    """Cut behind a newline, it is whole; then the ledgers show what it lacks. A torn last line goes."""
    journal = Journal.create(tmp_path, "id")
    journal.begin("a")
    journal.end("a", 1.5, "")
    journal.end("a", 9.0, "")
    path = tmp_path / JOURNAL
    content = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert Journal(tmp_path, "id").outcomes == {"a": {"score": 1.5, "why": "", "files": {}}}
    with pytest.raises(LostError, match="line 1"):
        Journal(tmp_path, "other")
    lines = content.splitlines(keepends=True)
    for damaged in (b"", b"[]\n", b"null\n", lines[0] + lines[2], content.replace(b"1.5", b"2.5")):
        path.write_bytes(damaged)
        with pytest.raises(LostError, match=JOURNAL):
            Journal(tmp_path, "id")
    for size in range(len(lines[0]), len(content)):
        path.write_bytes(content[:size])
        found = Journal(tmp_path, "id")
        assert path.read_bytes() == content[: content[:size].rfind(b"\n") + 1]
        assert not found.outcomes
    path.unlink()
    with pytest.raises(LostError, match="missing"):
        Journal(tmp_path, "id")
