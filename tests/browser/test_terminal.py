"""Tests of what a recorded terminal shows in the end."""

from __future__ import annotations

from tests.browser.terminal import shown


def test_a_line_that_was_written_over_shows_what_came_last() -> None:
    recording = "Script started on a day\r\nstage 1\r\x1b[2K\x1b[?25lstage 2\r\x1b[2Kdone\r\nnext\rlast\r\n"
    assert shown(recording) == ["done", "last", ""]


def test_progress_of_two_lines_is_taken_back() -> None:
    assert shown("one\r\ntwo\r\x1b[2K\x1b[1A\x1b[2Kended\r\nmore") == ["ended", "more"]
