"""Rehearsal: public records choose, and the private ones see the choice once, at the full budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_tuning import QUICK, checkpoint, rows

import dptune
from dptune.errors import ConfigError, DivergedError
from dptune.tuning.search import rehearsal as module
from dptune.tuning.search.rehearsal import rehearsal_file

SEARCH = {"space": {"learning_rate": {"log_uniform": [0.001, 0.05]}}, "candidates": 3, "score": "rehearsal"}


def tuned(out: Path, **more: Any) -> Any:
    given = {"epsilon": 8, "delta": 1e-3, "unit": "customer_id", "search": SEARCH, "public": rows(40, 40)} | more
    return dptune.tune(checkpoint(), rows(), out=out, **QUICK, **given)


def test_the_best_on_public_records_is_trained_once_within_the_whole_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def trial(base: Any, weights: Any, own: Any, schedule: Any, mechanism: Any, records: Any, rate: float) -> float:
        tried.append(rate)
        return [9.0, 3.0, math.inf][len(tried) - 1]

    monkeypatch.setattr(module, "trial", trial)
    found = tuned(tmp_path / "out")
    assert len(tried) == 3
    assert found.certificate is None
    assert 7.5 < found.epsilons.certified <= 8
    assert json.loads((tmp_path / "out" / "cell.json").read_text())["learning_rate"] == tried[1]
    again = tuned(tmp_path / "out")  # what was chosen stays chosen
    assert len(tried) == 3
    assert again.ledger.chain == found.ledger.chain
    known = json.loads(rehearsal_file(tmp_path / "out").read_text())
    assert [one[1] for one in known["tried"]] == ["9.0", "3.0", "inf"]
    with pytest.raises(ConfigError, match=r"out: .* rehearsed for something else \(epsilon\)"):
        tuned(tmp_path / "out", epsilon=4)
    assert tuned(tmp_path / "out").ledger.chain == found.ledger.chain, "taking it back goes on"
    assert len(tried) == 3


def test_a_rehearsal_reads_no_private_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def look(source: Any, *_: Any) -> None:
        given.append(source)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "read_public", look)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "out")
    assert [(source.data, source.public) for source in given] == [(rows(40, 40), None)]


def test_a_rehearsal_needs_public_records_and_a_candidate_that_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="public"):
        tuned(tmp_path / "none", public=None)
    monkeypatch.setattr(module, "trial", lambda *_: math.inf)
    with pytest.raises(DivergedError, match="every candidate"):
        tuned(tmp_path / "out")
    assert not (tmp_path / "out" / "ledger.jsonl").exists()
