"""What the search flow shows and remembers, without a server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import prepare_environment, write_params

from dptune.core.files import private_directory, write_json
from dptune.privacy.run_folder import FOLDER, RunFolder
from flows import search as module
from flows.common.command import FlowError
from tasks.search.request import folder_of
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


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_search_that_stops_beside_an_unfinished_ranking_leaves_a_page_that_nobody_remembers(
    settings: Settings, begun: bool, check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with its own error, and so does the next one: a search that was refused has not ended either."""
    folder, stopped = folder_of(settings), FlowError("the search has not ended", "the disk is full. Fix: free it.", 2)
    write_json(RunFolder(folder).results, {"rehearsed": True, "released": True})
    if begun:
        private_directory(folder / FOLDER)

    def stop(*_: Any) -> None:
        raise stopped

    written = _without_a_server(monkeypatch)
    monkeypatch.setattr(module, "run_search", stop)
    monkeypatch.setattr(module, "publish", lambda *_: pytest.fail("another command may be at work on it"))
    monkeypatch.setattr(module, "remember_shown", lambda *_: pytest.fail("it has not ended"))
    with pytest.raises(FlowError) as caught:
        module.search.fn(overrides={"search": {"score": "rehearsal", "check_ranking": check}})
    assert caught.value is stopped
    assert written == (["page"] if begun else [])


def test_a_search_that_ends_beside_a_ranking_that_nobody_asks_for_any_more_is_remembered(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(settings)
    write_json(RunFolder(folder).results, {"rehearsed": True, "released": True})
    private_directory(folder / FOLDER)
    remembered: list[str] = []
    _without_a_server(monkeypatch)
    monkeypatch.setattr(module, "run_search", lambda *_: None)
    monkeypatch.setattr(module, "publish", lambda *_: True)
    monkeypatch.setattr(module, "show_file", lambda *_: None)
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger())
    monkeypatch.setattr(module, "remember_shown", lambda asked, page, answer: remembered.append(answer))
    module.search.fn(overrides={"search": {"score": "rehearsal", "check_ranking": False}})
    assert remembered == ["the answer"]


def _without_a_server(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flow as a plain function, without its data. Returns the list of the pages that it writes."""
    written: list[str] = []
    monkeypatch.setattr(module, "write_search_page", module.write_search_page.fn)
    monkeypatch.setattr(module, "write_page", lambda *_: written.append("page") or "the answer")
    monkeypatch.setattr(module, "progress_page", lambda name: lambda share, now: None)
    for name in ("begin_flow", "make_data", "refuse_paid", "write_index", "_check"):
        monkeypatch.setattr(module, name, lambda *_: None)
    return written


def test_a_rehearsal_in_which_nothing_is_secret_says_what_it_does(settings: Settings) -> None:
    assert changed() == "searching; the number of candidates is secret, so no progress is shown"
    once = changed(score="rehearsal", candidates=2.5)
    assert once == "rehearsing 3 settings on public records, then one run on the private ones"
    assert (
        changed(score="rehearsal", candidates=3, check_ranking=True) == f"{once}, and then one for each other setting"
    )
