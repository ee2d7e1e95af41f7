"""Files are whole or absent, and their owner's."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest

from dptune.core import files
from dptune.core.errors import DptuneError
from dptune.core.files import (
    discard_partial,
    locked,
    private_directory,
    replacing,
    replacing_folder,
    sha256,
    write_json,
    write_text,
)


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


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    """Its process has died; that of one that lives, or of another machine, stays."""
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    number, host = int(dead.stdout), gethostname()
    left = tmp_path / f".notes.txt.{host}-{number}.partial"
    others = [
        tmp_path / f".notes.txt.{host}-{os.getppid()}.partial",
        tmp_path / f".notes.txt.elsewhere-{number}.partial",
    ]
    for path in (left, *others):
        path.write_text("half")
    write_text(tmp_path / "notes.txt", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "notes.txt", *others])
    discard_partial(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]


@pytest.mark.parametrize("existed", [False, True])
def test_a_folder_is_put_whole_at_whatever_call_the_process_dies(existed: bool, tmp_path: Path) -> None:
    """The process is killed at each call of the system in turn; the folder is old, new or absent, and never mixed."""
    target = tmp_path / "adapter"
    program = """
import os, shutil, sys
from pathlib import Path
from dptune import files
left, target = int(sys.argv[1]), Path(sys.argv[2])
def counted(real):
    def call(*given, **more):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return real(*given, **more)
    return call
for owner, name in ((os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "rename"), (Path, "write_text")):
    setattr(owner, name, counted(getattr(owner, name)))
with files.replacing_folder(target) as made:
    for name in ("weights", "card"):
        (made / name).write_text("new")
"""
    states, status, killed_at = set(), 9, 0
    while status == 9:
        shutil.rmtree(target, ignore_errors=True)
        if existed:
            target.mkdir()
            for name in ("weights", "card"):
                (target / name).write_text("old")
        status = subprocess.run([sys.executable, "-c", program, str(killed_at), str(target)], check=False).returncode
        killed_at += 1
        states.add(
            tuple(sorted((path.name, path.read_text()) for path in target.glob("*"))) if target.exists() else None
        )
    old, new = ((("card", one), ("weights", one)) for one in ("old", "new"))
    assert status == 0
    assert states <= {old, new, None}
    assert {new, old if existed else None} <= states
    assert killed_at > 5
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_folder_is_durable_to_its_last_file_before_it_takes_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a whole folder of empty files under the final name."""
    synced: set[int] = set()
    before: list[set[int]] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> Path:
        before.append({*synced})
        return real_rename(source, target)

    target = tmp_path / "adapter"
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    with replacing_folder(target) as made:
        (made / "deep").mkdir()
        for name in ("weights", "card", "deep/tokens"):
            (made / name).write_text("new")
    (durable,) = before
    assert {path.stat().st_ino for path in (target, *target.rglob("*"))} <= durable
    assert tmp_path.stat().st_ino in synced


def test_another_users_process_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says of such a process only that no signal may be sent to it; what it writes is not removed."""

    def kill(process: int, signal: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", kill)
    other = tmp_path / f".notes.txt.{gethostname()}-{os.getppid()}.partial"
    other.write_text("half")
    write_text(tmp_path / "notes.txt", "whole")
    assert other.read_text() == "half"


def test_nobody_else_can_open_a_lock_and_hold_it(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with locked(tmp_path / "lock"):
            assert mode(tmp_path / "lock") == 0o600
    finally:
        os.umask(previous)


def test_a_lock_that_is_waited_for_says_by_whom_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_SILENT", 0.1)
    path = tmp_path / "lock"
    program = f"""
import time
from pathlib import Path
from dptune.core.files import locked
with locked(Path({str(path)!r})):
    print("held", flush=True)
    time.sleep(1.5)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(DptuneError, match=rf"another process works on it( \(process {holder.pid}\))?\. Fix: "):
            locked(path).__enter__()
        with caplog.at_level(logging.WARNING), locked(path, wait=True):
            pass
    (said,) = caplog.messages
    assert said.startswith(f"{path} is locked by another process")
    if Path("/proc/locks").exists():
        assert f"(process {holder.pid})" in said


@pytest.mark.timeout(20)
def test_a_lock_whose_place_is_a_stream_is_refused(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "lock")
    with pytest.raises(DptuneError, match="is a FIFO"):
        locked(path).__enter__()


@pytest.mark.parametrize("planted", ["link", "file"])
def test_what_others_planted_under_a_temporary_name_gets_nothing(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder where others may write they know the name, which holds host and process."""
    (theirs := tmp_path / "theirs").write_text("of theirs")
    theirs.chmod(0o666)
    target, temporary = tmp_path / "secret.json", files._temporary(tmp_path / "secret.json")
    if planted == "link":
        temporary.symlink_to(theirs)
    else:
        temporary.hardlink_to(theirs)
    write_text(target, "secret")
    assert theirs.read_text() == "of theirs"
    assert not target.is_symlink()
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("secret", 0o600)
