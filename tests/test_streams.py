"""Streams in the place of files: read once where that makes sense, refused by name where it does not."""

from __future__ import annotations

import gzip
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from dptune.core import streams
from dptune.core.errors import DataError
from dptune.core.streams import read_input
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.spent_budgets.register import Register
from dptune.records.reading.read import read
from dptune.records.reading.source import RecordSource


def writing(path: Path, content: bytes, after: float = 0.0) -> threading.Thread:
    def write() -> None:
        time.sleep(after)
        with path.open("wb") as file:
            for start in range(0, len(content), 50_000):
                file.write(content[start : start + 50_000])

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def test_records_are_read_from_a_stream(tmp_path: Path) -> None:
    """As `<(zcat letters.jsonl.gz)` makes one, larger than a pipe's buffer; packed ones too."""
    lines = b"".join(b'{"text": "letter %d"}\n' % number for number in range(20_000))
    for name, content in (("a.jsonl", lines), ("b.jsonl.gz", gzip.compress(lines, 1))):
        os.mkfifo(path := tmp_path / name)
        thread = writing(path, content)
        assert len(read(RecordSource(path))) == 20_000
        thread.join()


def test_a_stream_without_a_writer_is_waited_for_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "_SILENT", 0.05)
    os.mkfifo(path := tmp_path / "slow")
    with caplog.at_level(logging.WARNING):
        thread = writing(path, b"late", after=0.4)
        assert read_input(path) == b"late"
    thread.join()
    (said,) = caplog.messages
    assert said == f"{path} is a FIFO: waiting for what its writer sends"


@pytest.mark.timeout(20)
def test_what_has_no_end_or_no_bytes_is_refused_by_name(tmp_path: Path) -> None:
    folder, place = tmp_path / "folder", tmp_path / "socket"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))
        for path, what in ((place, "socket"), (folder, "folder"), (Path("/dev/zero"), "device")):
            with pytest.raises(DataError, match=rf"cannot be read \(it is a {what}\)\. Fix: "):
                read(RecordSource(path, format="jsonl"))


@pytest.mark.timeout(20)
def test_a_ledger_or_register_that_is_a_stream_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="is a FIFO"):
        read_ledger(path)
    os.mkfifo(spent := tmp_path / "spent.jsonl")
    with pytest.raises(Exception, match=r"spent\.jsonl: is a FIFO.*Fix: "):
        Register(spent).totals()
