"""Cells of studies in the register: each counts once, a study has one line, and no start waits for prices."""

from __future__ import annotations

import json
import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from test_certificate import RELEASE, certificate, header
from typer.testing import CliRunner

from dptune.cli import app
from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.release import Release
from dptune.privacy.spent_budgets import totals
from dptune.privacy.spent_budgets.register import Register, said


def ledger(number: int = 0, **changes: Any) -> LedgerContents:
    own = replace(header(**changes), run_id=f"cell {number}")
    return LedgerContents(own, Counter({RELEASE: 40}), 40, "chain", complete=False)


def leaking(number: int) -> LedgerContents:
    found = ledger(number)
    return replace(found, header=replace(found.header, accounting="published", leaks=("a raw norm",)))


def add(path: Path, numbers: list[int]) -> None:
    for number in numbers:
        Register(path).add_cell("people", "grid", ledger(number))


def test_a_cell_counts_once_with_what_it_released(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for _ in range(2):
        register.add_cell("people", "grid", ledger())
    (one,) = register.earlier("people")
    assert (one.what, one.study, one.epsilon) == ("cell", "grid", ledger().epsilons.certified)
    (total,) = register.totals()
    assert (total.entries, total.epsilon) == (1, one.epsilon), "recomputed from what it holds"


def test_processes_that_end_cells_at_the_same_time_lose_and_double_none(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    with ProcessPoolExecutor(3, get_context("fork")) as pool:
        list(pool.map(add, [path] * 3, [[0, 1, 2, 3], [2, 3, 4, 5], [5, 4, 0, 6]]))
    assert sorted(one.id for one in Register(path).earlier("people")) == [f"cell {number}" for number in range(7)]


def test_a_copy_of_the_checkout_writes_the_checkouts_register_under_its_lock(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    link = tmp_path / "copy" / "spent.jsonl"
    link.symlink_to(tmp_path / "spent.jsonl")
    Register(link).add_cell("people", "grid", ledger())
    Register(tmp_path / "spent.jsonl").add_cell("people", "grid", ledger(1))
    assert Register(link).totals()[0].entries == 2
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {"spent.jsonl"}
    assert (tmp_path / "spent.jsonl").stat().st_mode & 0o777 == 0o600


def test_sixty_cells_are_told_at_once_and_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pricing some ledgers takes seconds each, and every command would wait for it."""
    register = Register(tmp_path / "spent.jsonl")
    for number in range(60):
        register.add_cell("people", "grid", leaking(number) if number < 12 else ledger(number))
    register.add_search("people", certificate(), again=False)
    price, searched = ledger().epsilons.certified, certificate().certified
    told = CliRunner().invoke(app, ["spent", str(register.path)]).stdout
    assert f"60, epsilon {at_most(48 * price, 4)} and 12 without bound" in told
    assert f"1, epsilon {searched:.4g}" in told
    assert len(told.splitlines()) < 14, "a study has one line"
    listed = json.loads(CliRunner().invoke(app, ["spent", str(register.path), "--json"]).stdout)["totals"]
    assert [(one["entries"], one["epsilon"]) for one in listed] == [(61, "inf")]
    assert [part["what"] for part in listed[0]["parts"]] == ["cell", "search"]
    cells = [one for one in register.earlier("people") if one.what == "cell"]
    assert said(cells).startswith(
        f"60 times, together epsilon ∞ at delta 0.0006, {at_most(48 * price, 4)} without the 12 "
    )
    assert "\n" not in said(cells)
    monkeypatch.setattr(totals, "_price_of", lambda content, what: pytest.fail("priced") if what == "cell" else 1.0)
    assert len(register.earlier("people")) == 61


def test_a_study_refuses_no_search_but_warns_it(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    assert register.warnings("people", again=False) == []
    register.add_cell("people", "grid", leaking(0))
    register.check("people", again=False)
    (warning,) = register.warnings("people", again=False)
    assert warning == "these records paid before (once, epsilon ∞ at delta 1e-05); the cost of this search adds to that"
    register.add_search("people", certificate(), again=False)
    with pytest.raises(ConfigError, match=r"paid before \(2 times, together epsilon ∞"):
        register.check("people", again=False)
    assert register.warnings("people", again=False) == []
    assert len(register.warnings("people", again=True)) == 1
    assert len(register.warnings("people", certificate().id, again=False)) == 1, "a search that goes on"


def test_a_cell_with_a_filter_counts_with_what_it_released(tmp_path: Path) -> None:
    """It has ended, so that it moves its noise no more."""
    register, found = Register(tmp_path / "spent.jsonl"), ledger(renyi_filter=RenyiFilter(4.0, 4.0))
    register.add_cell("people", "grid", found)
    assert register.totals()[0].epsilon == found.epsilons.certified < 8


def test_studies_have_parts_of_their_own(tmp_path: Path) -> None:
    register = Register(tmp_path / "spent.jsonl")
    for number, study in enumerate(("one", "other", "one")):
        register.add_cell("people", study, ledger(number))
    register.add_run("people", header(), Counter({RELEASE: 40}))
    parts = register.totals()[0].parts
    assert [(part.what, part.study, part.entries, part.unbounded) for part in parts] == [
        ("cell", "one", 2, 0),
        ("cell", "other", 1, 0),
        ("run", "", 1, 0),
    ]
    assert math.fsum(part.bounded for part in parts) == pytest.approx(register.totals()[0].epsilon)


def test_a_cell_that_moved_its_noise_counts_as_the_budget_of_its_filter(tmp_path: Path) -> None:
    """A lower price, by what the noise used of it, would need an odometer."""
    chosen = RenyiFilter(4.0, 4.0)
    moved = Counter({Release(0.02, 1.2, adaptive=True): 20, Release(0.02, 1.5, adaptive=True): 20})
    register = Register(tmp_path / "spent.jsonl")
    for number, releases in enumerate((moved, Counter({Release(0.9, 0.3, adaptive=True): 40}))):
        own = replace(header(renyi_filter=chosen), run_id=str(number))
        register.add_cell("people", "grid", LedgerContents(own, releases, 40, "chain", complete=False))
    within, beyond = register.earlier("people")
    assert within.epsilon == pytest.approx(chosen.limit(within.delta), rel=1e-12)
    assert within.epsilon > header().price(Counter({replace(one, adaptive=False): 20 for one in moved})).certified
    assert beyond.epsilon == math.inf, "releases beyond the budget have no bound"
    (total,) = register.totals()
    assert (total.parts[0].bounded, total.parts[0].unbounded) == (within.epsilon, 1), "recomputed alike"
