"""Files are whole or absent, and their owner's."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from pathlib import Path

import pytest

from dptune.files import private_directory, replacing, sha256, write_json, write_text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_written_whole_for_its_owner_alone(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "notes.txt"
    previous = os.umask(0)
    try:
        write_text(target, "é")
    finally:
        os.umask(previous)
    assert target.read_bytes() == "é".encode()
    assert mode(target) == 0o600
    assert list(target.parent.iterdir()) == [target]


def test_an_open_file_that_is_replaced_becomes_private(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("old")
    target.chmod(0o644)
    write_text(target, "new")
    assert (target.read_text(), mode(target)) == ("new", 0o600)


def fail_within(target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("existed", [True, False])
def test_an_interrupted_write_changes_nothing(tmp_path: Path, existed: bool) -> None:
    target = tmp_path / "notes.txt"
    if existed:
        target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        fail_within(target)
    assert [path.read_text() for path in tmp_path.iterdir()] == (["old"] if existed else [])


def test_the_content_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_text(tmp_path / "notes.txt", "text")
    assert events == ["file", "rename", "directory"]


def test_the_temporary_file_is_private_from_its_first_byte(tmp_path: Path) -> None:
    with replacing(tmp_path / "notes.txt") as temporary:
        assert mode(temporary) == 0o600
        assert temporary.parent == tmp_path
        temporary.write_text("text")


def test_json_is_sorted_and_refuses_what_is_not_json(tmp_path: Path) -> None:
    target = tmp_path / "values.json"
    write_json(target, {"b": 1, "a": [2.5]})
    assert json.loads(target.read_text()) == {"a": [2.5], "b": 1}
    assert target.read_text().index('"a"') < target.read_text().index('"b"')
    before = target.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        write_json(target, {"a": math.nan})
    assert target.read_bytes() == before


def test_a_private_directory_is_closed_even_if_it_was_open(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    assert mode(private_directory(tmp_path / "run")) == 0o700
    assert mode(private_directory(tmp_path / "new" / "run")) == 0o700


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert sha256(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()
