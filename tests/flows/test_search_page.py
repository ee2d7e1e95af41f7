"""What the search flow shows and remembers, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import prepare_environment, write_params

from flows import search as module
from tasks.settings.params import Settings, load_settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    prepare_environment(monkeypatch, tmp_path)
    write_params()
    return load_settings()


def changed(**search: Any) -> str:
    """What the page of such a search says while it runs."""
    return module._under_way(load_settings(overrides={"search": search}).search)


@pytest.mark.parametrize("why", [None, "every candidate failed"])
@pytest.mark.parametrize("sent", [True, False])
def test_only_a_search_with_a_winner_that_was_sent_is_remembered_as_shown(
    settings: Settings, why: str | None, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed one, run again, must fail again."""
    remembered: list[str] = []
    monkeypatch.setattr(module, "write_page", lambda *_: "the answer")
    monkeypatch.setattr(module, "write_index", lambda: None)
    monkeypatch.setattr(module, "publish", lambda *_: sent)
    monkeypatch.setattr(module, "failure_of", lambda folder: why)
    monkeypatch.setattr(module, "remember_shown", lambda asked, page, answer: remembered.append(answer))
    assert module.write_search_page.fn(settings) == "the answer"
    assert remembered == (["the answer"] if sent and why is None else [])


def test_a_rehearsal_in_which_nothing_is_secret_says_what_it_does(settings: Settings) -> None:
    assert changed() == "searching; the number of candidates is secret, so no progress is shown"
    once = changed(score="rehearsal", candidates=2.5)
    assert once == "rehearsing 3 settings on public records, then one run on the private ones"
    assert (
        changed(score="rehearsal", candidates=3, check_ranking=True) == f"{once}, and then one for each other setting"
    )
