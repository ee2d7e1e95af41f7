"""Bars at a terminal, whatever it says of its width; lines elsewhere."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from dptune.core.progress import Meter, progress

_WORK = """
import time
from dptune.core.progress import progress
for _ in progress(range(6), "working", total=6):
    time.sleep(0.15)
"""


def drawn_at_a_terminal(columns: int, rows: int) -> str:
    """What the work writes to a terminal of that size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen([sys.executable, "-c", _WORK], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 4096):
            written += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    return written.decode()


@pytest.mark.parametrize(("columns", "rows"), [(0, 40), (100, 40), (0, 0)])
def test_a_terminal_shows_a_bar(columns: int, rows: int) -> None:
    written = drawn_at_a_terminal(columns, rows)
    assert written.count("working") >= 3
    assert "%|" in written


def test_elsewhere_there_are_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert list(progress("abc", "working", total=3)) == ["a", "b", "c"]
    assert "working: done, 3 of 3" in caplog.text


def test_a_resumed_meter_counts_from_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Meter("working", total=9, done=4, unit="rows") as meter:
        meter.update(9)
    assert "9 of 9 rows" in caplog.text


def test_an_error_says_nothing_of_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError), Meter("working"):
        raise RuntimeError
    assert "done" not in caplog.text
