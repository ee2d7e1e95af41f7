"""A small search over tiny models, whose number of candidates a test sets, and which a test may kill."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import known_prices  # noqa: F401 (replaces the pricing of searches)
import pytest
from tiny_tuning import QUICK, checkpoint, rows

from dptune.job.base_model import open_base
from dptune.job.preparation import PreparedRun, prepare
from dptune.job.run import Tuned
from dptune.job.search import search as search_module
from dptune.job.search.plan import Journal, Plan
from dptune.job.search.search import search, working_folder
from dptune.job.search.settings import SearchSettings
from dptune.job.settings import TuneSettings
from dptune.privacy.selection_law import SelectionLaw
from dptune.privacy.spent_budgets.register import Register
from dptune.records.reading.source import RecordSource

SPACE = {"learning_rate": {"log_uniform": [0.001, 0.05]}}


def outcomes(out: Path) -> dict[str, dict[str, Any]]:
    """What became of each candidate that ended, of the search that goes to ``out``."""
    working = working_folder(out)
    return Journal(working, Plan.read(working).id).outcomes


def asked(**changes: Any) -> SearchSettings:
    return SearchSettings.of({"space": SPACE, "candidates": 3, "together": 2} | changes)


def prepared(*, scored: bool = True, public: bool = True, **changes: Any) -> PreparedRun:
    given = {"epsilon": 8.0, "delta": 1e-3, "eval_share": 0.2, "telemetry": "private"} | QUICK | {"epochs": 1} | changes
    chosen = TuneSettings(**given)
    source = RecordSource(rows(60, 30), unit="customer_id", public=rows(6) if public else None)
    return prepare(source, open_base(str(checkpoint()), chosen), chosen, scored=scored)


@lru_cache(maxsize=1)
def usual() -> PreparedRun:
    return prepared()


def draws(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the law draw this number of candidates."""
    monkeypatch.setattr(SelectionLaw, "draw", lambda law, entropy: count)


def start(folder: Path, own: PreparedRun | None = None, **changes: Any) -> Tuned:
    return search(own or usual(), asked(**changes), folder / "out", Register(folder / "spent.jsonl"))


def killed(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> Path:
    """Start a search and kill it before its first candidate; returns its working folder."""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search_module, "run_candidates", die)
        with pytest.raises(KeyboardInterrupt):
            start(folder, **changes)
    return working_folder(folder / "out")
