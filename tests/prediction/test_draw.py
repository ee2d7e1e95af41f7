"""One answer: charged on disk before anything is computed or drawn, and from laws that no rare token betrays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dptune.prediction import predictor as module
from dptune.prediction.predictor import PrivatePredictor
from dptune.prediction.protocols import PUBLISHED_ACCOUNTANT, FixedMixture, planned_answers
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_header import RunHeader

PROTOCOL = FixedMixture(tokens=6, models=2, public_weight=0.3)
RARE = 1e-14  # below 2^-40, which a draw of 52 bits hardly ever gives


class Nothing:
    """A model and adapters that are never asked."""

    def eval(self) -> Nothing:
        return self

    def __len__(self) -> int:
        return PROTOCOL.models

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=np.zeros((100, 1)))


def charged(path: Path) -> int:
    return path.read_bytes().count(b'"kind":"release"')


class Watching(OsEntropy):
    """Notes how many charges are on the disk when randomness is drawn."""

    def __init__(self, path: Path, seen: list[int]) -> None:
        super().__init__()
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "seen", seen)

    def words(self, count: int) -> NDArray[np.uint64]:
        self.seen.append(charged(self.path))  # type: ignore[attr-defined]
        return super().words(count)


def opened(path: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch) -> PrivatePredictor:
    """A predictor whose public model hardly ever says token 2, and whose private ones say little else."""
    laws = {-1: [0.6, 0.4 - RARE, RARE], 0: [0.1, 0.2, 0.7], 1: [0.5, 0.4, 0.1]}

    def passed(_model: Any, _adapters: Any, _context: Any, rows: list[int]) -> torch.Tensor:
        seen.append(charged(path))
        return torch.tensor([laws[row] for row in rows], dtype=torch.float64).log()

    monkeypatch.setattr(module, "next_log_probabilities", passed)
    header = RunHeader(
        "pmixed", PUBLISHED_ACCOUNTANT, "certified", PROTOCOL.epsilon, PROTOCOL.delta, "shard", PROTOCOL.models
    )
    ledger = Ledger.create(path, header, planned_answers(PROTOCOL))
    nothing: Any = Nothing()
    return PrivatePredictor(nothing, nothing, PROTOCOL, ledger, Watching(path, seen))


def test_every_token_is_on_the_disk_before_its_pass_and_its_coins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    predictor = opened(tmp_path / "ledger.jsonl", seen, monkeypatch)
    for count in range(1, PROTOCOL.tokens + 1):
        predictor.answer([1])
        assert len(seen) >= 2
        assert set(seen) == {count}
        seen.clear()


def test_no_draw_is_from_a_law_with_a_token_that_the_public_model_never_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its coming would be proof of a private model, though on paper the public one covers it."""
    laws: list[torch.Tensor] = []

    def noted(law: torch.Tensor, place: float) -> int:
        laws.append(law)
        return 0

    monkeypatch.setattr(module, "token_at", noted)
    opened(tmp_path / "ledger.jsonl", [], monkeypatch).answer([1])
    assert len(laws) == 2
    for law in laws:
        assert float(law[2]) == 0
        assert float(law.sum()) == pytest.approx(1)
