"""A disk that can be stopped at any operation, and then forgets what a power cut would make a real one forget."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dptune.training import checkpoints


class Killed(BaseException):
    """The process is gone: nothing may catch it, and nothing reaches the disk afterwards."""


class _File:
    """What of a file's content is surely on the disk."""

    synced = b""


class Disk:
    """The files of one folder, whose writes, fsyncs, renames and removals are counted.

    A kill leaves everything that was written. A power cut leaves what was fsynced, and of the rest an arbitrary part:
    of a file's content a piece, of the folder's names all or none since its last fsync.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, moments: random.Random, deaf_to: str = "") -> None:
        """Put the disk under ``folder``.

        Args:
            deaf_to: a file's name whose fsync does nothing, to show that tests notice.
        """
        self.folder, self.operations, self.deaf_to = folder, 0, deaf_to
        self._moments, self._left, self._dead = moments, 0, False
        self._files: dict[int, _File] = {}
        self._names: dict[str, _File] = {}
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "ftruncate", "unlink")}
        for name in self._real:
            patch.setattr(os, name, getattr(self, f"_{name}"))
        self._save_file = checkpoints.save_file
        patch.setattr(checkpoints, "save_file", self._save)

    def kill_at(self, operation: int) -> None:
        """Die at this operation from now: before it, in its middle or after it."""
        self._left, self._dead = operation, False

    def restart(self, *, power_cut: bool) -> None:
        """Be there for another process."""
        self._left, self._dead = 0, False
        if power_cut:
            self._forget()

    def _do(self, act: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        if self._dead:
            raise Killed
        self.operations += 1
        self._left -= 1
        if self._left != 0:
            return act()
        self._dead = True
        when = self._moments.choice(["before", "middle", "after"])
        if when == "after":
            act()
        elif when == "middle" and half is not None:
            half()
        raise Killed

    def _mine(self, path: Any) -> bool:
        return not isinstance(path, int) and Path(path).parent == self.folder

    def _file(self, inode: int) -> _File:
        return self._files.setdefault(inode, _File())

    def _open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        def act() -> int:
            new = not Path(path).exists()
            descriptor: int = self._real["open"](path, flags, *rest, **more)
            if new:
                self._files[os.fstat(descriptor).st_ino] = _File()
            return descriptor

        if self._mine(path) and flags & os.O_CREAT:
            return int(self._do(act))
        return int(self._real["open"](path, flags, *rest, **more))

    def _write(self, descriptor: int, data: bytes) -> int:
        if os.fstat(descriptor).st_ino not in self._files:
            return int(self._real["write"](descriptor, data))
        cut = self._moments.randrange(len(data))
        write = self._real["write"]
        return int(self._do(lambda: write(descriptor, data), lambda: write(descriptor, data[:cut])))

    def _save(self, tensors: Any, path: Path, **more: Any) -> None:
        def half() -> None:
            self._save_file(tensors, path, **more)
            os.truncate(path, self._moments.randrange(path.stat().st_size))

        self._do(lambda: self._save_file(tensors, path, **more), half)

    def _fsync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino

        def act() -> None:
            if inode == self.folder.stat().st_ino:
                self._names = self._listing()
                return
            name = next((path.name for path in self.folder.iterdir() if path.stat().st_ino == inode), self.deaf_to)
            if name != self.deaf_to:
                self._file(inode).synced = (self.folder / name).read_bytes()

        self._do(act)

    def _replace(self, source: Any, target: Any) -> None:
        self._do(lambda: self._real["replace"](source, target))

    def _ftruncate(self, descriptor: int, length: int) -> None:
        self._do(lambda: self._real["ftruncate"](descriptor, length))

    def _unlink(self, path: Any, **more: Any) -> None:
        if self._mine(path):
            self._do(lambda: self._real["unlink"](path, **more))
        else:
            self._real["unlink"](path, **more)

    def _listing(self) -> dict[str, _File]:
        return {path.name: self._file(path.stat().st_ino) for path in self.folder.iterdir()}

    def _forget(self) -> None:
        now = self._listing()
        written = {file: (self.folder / name).read_bytes() for name, file in now.items()}
        kept = self._moments.choice([now, self._names])
        contents = {name: self._survives(file.synced, written.get(file, file.synced)) for name, file in kept.items()}
        for name in now:
            self._real["unlink"](self.folder / name)
        self._files, self._names = {}, {}
        for name, content in contents.items():
            path = self.folder / name
            path.write_bytes(content)
            self._file(path.stat().st_ino).synced = content
        self._names = self._listing()

    def _survives(self, synced: bytes, written: bytes) -> bytes:
        if not written.startswith(synced):
            return self._moments.choice([synced, written])
        somewhere = self._moments.randint(len(synced), len(written))
        return written[: self._moments.choice([len(synced), len(written), somewhere])]
