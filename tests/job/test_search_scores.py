"""A record that raises weighs as one unit in a candidate's score, and what goes wrong in scoring ends no search."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_search import draws, start, usual

from dptune.job.search import candidates as candidates_module
from dptune.job.search import score as score_module
from dptune.job.search import search as search_module
from dptune.job.search.candidates import scored_units
from dptune.job.search.plan import Journal, LostError
from dptune.job.search.score import ONE, clipped_sum, unit_losses
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.training.data import Tokens
from dptune.training.privacy_units import PrivacyUnits

MODEL = torch.nn.Linear(1, 1)


def tokens(first: list[int]) -> Tokens:
    """Records of two tokens; ``losses_of`` reads the first."""
    return Tokens(tuple(np.array([one, 2]) for one in first), padding=0, width=4)


def losses_of(monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = IndexError) -> None:
    """Let a record's loss be its first token; 7 raises."""

    def found(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if (ids == 7).any():
            raise error("index out of range in self")
        return ids[:, 0].float()

    monkeypatch.setattr(score_module, "model_losses", found)


@pytest.mark.parametrize("error", [IndexError, RuntimeError, ZeroDivisionError, AttributeError])
def test_a_record_that_raises_moves_a_score_by_its_own_unit_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_of(monkeypatch, error)
    found = unit_losses(MODEL, tokens([1] * 15 + [7] + [2] * 3), PrivacyUnits.records(19), 16)
    assert np.isnan(found[15])
    assert found[[0, 14, 16, 18]].tolist() == [1, 1, 2, 2]
    before = np.full(19, 1.5)
    others = np.arange(19) != 15
    assert clipped_sum(found, before, 1.0) - clipped_sum(found[others], before[others], 1.0) == ONE


@pytest.mark.parametrize(
    "error", [OSError, MemoryError, KeyboardInterrupt, torch.OutOfMemoryError, torch.AcceleratorError]
)
def test_what_the_machine_or_the_user_stops_is_no_records_failure(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_of(monkeypatch, error)
    with pytest.raises(error):
        unit_losses(MODEL, tokens([1, 7]), PrivacyUnits.records(2), 16)


def test_a_units_share_of_the_sum_is_its_own_however_many_others_there_are() -> None:
    """Shares are rounded before they are added: rounding a sum of floats would let others move a unit's share."""
    losses = np.random.default_rng(7).normal(0, 0.7, 300)
    shares = [clipped_sum(losses[[at]], np.zeros(1), 1.0) for at in range(300)]
    for count in (2, 17, 299, 300):
        assert clipped_sum(losses[:count], np.zeros(count), 1.0) == sum(shares[:count])


def test_a_unit_counts_with_the_mean_of_its_first_records(monkeypatch: pytest.MonkeyPatch) -> None:
    losses_of(monkeypatch)
    units = PrivacyUnits.of("customer", np.array([0, 1, 0, 0, 2]), 2)
    found = unit_losses(MODEL, tokens([1, 5, 3, 20, 6]), units, 4)
    assert found.tolist() == [2, 5, 6]


def test_an_error_in_scoring_fails_one_candidate_and_not_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, 2)
    real, calls = candidates_module.unit_losses, []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first is of the base model
            raise IndexError("index out of range in self")
        return real(*arguments)

    monkeypatch.setattr(candidates_module, "unit_losses", fail)
    found = start(tmp_path).certificate
    assert found is not None
    assert found.winner is not None
    assert math.isfinite(found.winner.score)


def test_a_full_disk_fails_no_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)
    with monkeypatch.context() as patched:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(candidates_module, "train", full)
        with pytest.raises(OSError, match="No space"):
            start(tmp_path)
    assert start(tmp_path).certificate is not None


def test_a_score_is_charged_before_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, 1)
    real, seen = candidates_module.noisy_score, []

    def look(*arguments: Any) -> float:
        (path,) = tmp_path.rglob("candidates/*/score.jsonl")
        seen.append(read_ledger(path).releases)
        return real(*arguments)

    monkeypatch.setattr(candidates_module, "noisy_score", look)
    start(tmp_path)
    assert seen == [1]


@pytest.mark.parametrize("where", ["finish", "charge_score", "noisy_score", "end"])
def test_a_score_whose_process_died_is_the_same_when_it_is_made_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or after its charge, before the charge's ledger ends, or before its outcome is on disk: the
    candidate and its one draw are kept."""
    draws(monkeypatch, 1)
    place: Any = {"end": Journal, "finish": Ledger}.get(where, candidates_module)
    real, score, seen = getattr(place, where), candidates_module.noisy_score, []

    def look(*arguments: Any) -> float:
        seen.append((arguments[3], score(*arguments)))
        return seen[-1][1]

    def die(*arguments: Any) -> None:
        if where == "charge_score":
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(candidates_module, "noisy_score", look)
        patched.setattr(place, where, die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    (kept,) = tmp_path.rglob("candidates.jsonl")
    assert kept.stat().st_mode & 0o777 == 0o600
    (noise,) = (line["noise"] for line in map(json.loads, kept.read_text().splitlines()) if "noise" in line)
    monkeypatch.setattr(candidates_module, "noisy_score", look)
    done = start(tmp_path)
    assert done.certificate is not None
    assert [found[0] for found in seen] == [noise] * len(seen)
    assert len({round(found[1], 9) for found in seen}) == 1
    assert not list(tmp_path.rglob("candidates.jsonl")), "a result shows no noise"


def test_a_winner_whose_score_has_no_end_is_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version left a candidate that was killed between its score's charge and the end of that ledger."""
    draws(monkeypatch, 1)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_module, "_publish", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    (ledger,) = tmp_path.rglob("score.jsonl")
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    assert not read_ledger(ledger).complete
    assert start(tmp_path).certificate is not None
    assert read_ledger(tmp_path / "out" / "adapter" / "score.jsonl").complete


@pytest.mark.parametrize("name", ["ledger.jsonl", "score.jsonl"])
def test_a_winner_whose_ledger_was_cut_is_not_delivered_and_its_ledger_not_ended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a ledger of fewer releases would be complete, and its chain in the certificate."""
    draws(monkeypatch, 1)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_module, "_publish", die)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    (ledger,) = tmp_path.rglob(f"candidates/*/{name}")
    whole = ledger.read_text()
    ledger.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    with pytest.raises(LostError, match="was cut: "):
        start(tmp_path)
    assert not read_ledger(ledger).complete
    ledger.write_text(whole)
    assert start(tmp_path).certificate is not None


def test_each_side_is_scored_on_its_own_units() -> None:
    own = usual()
    from dptune.privacy.certificate import ScoreTerms

    assert scored_units(own, ScoreTerms("held_out", 1.0, 2.0, 6)) == (own.evaluation, own.held_out)
    assert scored_units(own, ScoreTerms("train", 1.0, 20.0, 24)) == (own.tokens, own.units)
    assert scored_units(own, ScoreTerms("public", 0.0, 0.0, 6)) is None
