"""What is booked when a ledger begins: after all that may refuse it, before its first line is whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_certificate import RELEASE, header

from dptune.core.errors import ConfigError
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.run_folder import RunFolder

PLAN = Counter({RELEASE: 40})


class Book:
    """A context that notes when it is entered and left, and what the ledger's file holds then."""

    def __init__(self, path: Path, before: BaseException | None = None, after: BaseException | None = None) -> None:
        self.path, self.seen = path, []
        self._before, self._after = before, after

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.seen.append(self.path.read_bytes())
        if self._before:
            raise self._before
        yield
        self.seen.append(self.path.read_bytes())
        if self._after:
            raise self._after


def test_all_but_the_end_of_the_first_line_is_there_when_the_run_is_booked(tmp_path: Path) -> None:
    book = Book(path := tmp_path / "ledger.jsonl")
    Ledger.create(path, header(), PLAN, book).close()
    before, after = book.seen
    assert before + b"\n" == after == path.read_bytes()
    assert read_ledger(path).releases == 0


def test_a_plan_beyond_its_budget_is_not_booked(tmp_path: Path) -> None:
    book = Book(path := tmp_path / "ledger.jsonl")
    with pytest.raises(BudgetError):
        Ledger.open(path, replace(header(), epsilon=0.1), PLAN, book)
    assert (book.seen, path.exists()) == ([], False)


def test_a_folder_that_cannot_be_written_is_not_booked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book, opened = Book(path := tmp_path / "ledger.jsonl"), os.open

    def refused(name: Any, flags: int, *rest: Any) -> int:
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return opened(name, flags, *rest)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(LedgerError, match="cannot be created"):
        Ledger.create(path, header(), PLAN, book)
    assert book.seen == []


def test_a_ledger_that_goes_on_is_not_booked_by_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path, header(run_id="x"), PLAN).close()
    book = Book(path)
    Ledger.open(path, header(run_id="x"), PLAN, book).close()
    assert book.seen == []


@pytest.mark.parametrize("error", [ConfigError("it", "is refused", fix="no"), KeyboardInterrupt()])
def test_a_booking_that_is_refused_leaves_no_ledger(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(type(error)):
        Ledger.create(path, header(), PLAN, Book(path, before=error))
    assert not path.exists()
    assert not RunFolder(tmp_path).has_begun


@pytest.mark.parametrize("error", [ConfigError("it", "failed", fix="no"), KeyboardInterrupt()])
def test_a_ledger_that_has_begun_stays_whatever_fails_after_it(error: BaseException, tmp_path: Path) -> None:
    """It is in the register: taken away, the run would begin again as another one."""
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(type(error)):
        Ledger.create(path, header(run_id="x"), PLAN, Book(path, after=error))
    assert RunFolder(tmp_path).has_begun
    with Ledger.open(path, header(run_id="x"), PLAN) as ledger:
        ledger.charge(RELEASE)


def test_a_disk_that_is_full_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    full = OSError(28, "No space left on device", "the register")
    with pytest.raises(LedgerError, match=r"the register: cannot be written \(No space left on device\)"):
        Ledger.create(path, header(), PLAN, Book(path, before=full))
