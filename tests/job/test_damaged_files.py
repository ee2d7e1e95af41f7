"""Files of a run that were cut off, emptied or replaced: a sentence, or the run goes on; never a second payment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_search import draws, killed, prepared, start

from dptune.core.errors import DptuneError
from dptune.job.run import run
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.spent_budgets.register import Register

#: What becomes of a file's content: cut off at the start, in the middle and at its end; and JSON of another type.
DAMAGES = (
    lambda content: b"",
    lambda content: content[: len(content) // 2],
    lambda content: content[:-2],
    lambda content: b"[]\n",
    lambda content: b"null\n",
    lambda content: b"{}\n",
)


def damages(folder: Path, kept: Path, *names: str) -> Iterator[Path]:
    """Make the folder what it was in ``kept`` but for one damaged file; yield that, and begin anew."""
    for path in sorted(kept.rglob("*")):
        if path.is_file() and path.suffix in (".json", ".jsonl", ".safetensors") and path.name in names:
            for damage in DAMAGES:
                shutil.rmtree(folder)
                shutil.copytree(kept, folder)
                (place := folder / path.relative_to(kept)).write_bytes(damage(path.read_bytes()))
                yield place


@pytest.mark.one_case
@pytest.mark.parametrize("ended", [False, True])
def test_a_run_whose_file_was_damaged_is_refused_in_a_sentence_or_pays_once(ended: bool, tmp_path: Path) -> None:
    own, folder, kept = prepared(scored=False), tmp_path / "run", tmp_path / "kept"
    register = Register(folder / "spent.jsonl")

    def stop(report: object) -> None:
        if not ended:
            raise KeyboardInterrupt

    try:
        run(own, folder / "out", register, on_step=stop)
    except KeyboardInterrupt:
        assert not ended
    shutil.copytree(folder, kept)
    names = ("cell.json", "booking.json", "ledger.jsonl", "spent.jsonl", "checkpoint.safetensors")
    names += ("result.json", "adapter_config.json", "adapter_model.safetensors")
    refused = []
    for damaged in damages(folder, kept, *names):
        try:
            run(own, folder / "out", register)
        except DptuneError as error:
            refused.append((damaged, str(error)))
        else:
            assert "ledger.jsonl" not in str(damaged) or not ended, (
                "a cut ledger of a run that ended would release more"
            )
            contents = read_ledger(folder / "out" / "ledger.jsonl")
            assert (contents.releases, contents.complete) == (own.plan.steps, True), damaged
        if damaged.name != "spent.jsonl":  # a second line would be a second run
            assert register.path.read_bytes() == (kept / "spent.jsonl").read_bytes(), damaged
        elif not (refused and refused[-1][0] == damaged):
            assert [one.entries for one in register.totals()] == [1], damaged
    assert len(refused) > len(DAMAGES)
    cut = [said for damaged, said in refused if ended and damaged == folder / "out" / "ledger.jsonl"]
    assert all("that folder holds a copy" in said for said in cut)
    for damaged, said in refused:
        assert ". Fix: " in said, damaged
        assert "\n" not in said, damaged
        assert damaged.name in said or "ledger" in said, (damaged, said)


def test_a_search_whose_file_was_damaged_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 1)
    folder, kept = tmp_path / "run", tmp_path / "kept"
    folder.mkdir()
    killed(monkeypatch, folder)
    shutil.copytree(folder, kept)
    for damaged in damages(folder, kept, "plan.json", "candidates.jsonl", "certificate.jsonl", "cell.json"):
        with monkeypatch.context() as patched:
            patched.setattr("dptune.job.search.search.run_candidates", _stop)
            with pytest.raises((DptuneError, KeyboardInterrupt)) as caught:
                start(folder, again=True)
        if isinstance(caught.value, DptuneError):
            assert ". Fix: " in str(caught.value), damaged
            assert "\n" not in str(caught.value), damaged
        assert [one.entries for one in Register(folder / "spent.jsonl").totals()] == [1], damaged


def _stop(*_: object) -> None:
    raise KeyboardInterrupt
