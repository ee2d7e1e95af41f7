"""Running tests against planted bugs, each in a copy of the tree; the working tree is never touched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Literal

from tests.mutants.mutant import Mutant, StaleMutantError

#: A planted bug may make a test wait for ever.
_LONGEST = 600
Kind = Literal["caught", "survived", "harmless", "stale", "broken"]


class UnsoundTestsError(Exception):
    """A test that is named fails without any bug, so that its failing would show nothing."""


@dataclass(frozen=True)
class Outcome:
    """What became of a planted bug.

    Attributes:
        kind: caught by a test; survived; harmless as the list says; stale (its text is gone from the file); or broken
            (pytest could not run the tests, so that nothing is known).
        detail: the first test that failed, or what is wrong.
        seconds: it took.
    """

    mutant: Mutant
    kind: Kind
    detail: str
    seconds: float = 0.0

    @property
    def fails(self) -> bool:
        """Whether somebody must do something about it."""
        return self.kind in ("survived", "stale", "broken")

    @property
    def notable(self) -> bool:
        """Whether the summary names it."""
        return self.kind != "caught" or bool(self.mutant.harmless)


def run(root: Path, mutants: Sequence[Mutant], jobs: int, tell: Callable[[str], None]) -> list[Outcome]:
    """Run the named tests without a bug, then with each; outcomes are in the order of ``mutants``.

    Args:
        tell: is given a line of progress at a time.

    Raises: UnsoundTestsError.
    """
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with TemporaryDirectory(prefix="dptune mutants ") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copies.put(_copied(root, Path(folder) / str(job)))
        tell(f"{len(tests)} tests and files of tests without any bug ...")
        begun, copy = time.monotonic(), copies.get()
        status, output = _pytest(copy, tests, *(("--numprocesses", str(jobs)) if jobs > 1 else ()))
        copies.put(copy)
        if status:
            raise UnsoundTestsError(f"{output}\nThe named tests do not pass without any bug. Fix: mend them first.")
        tell(f"... pass ({time.monotonic() - begun:.0f} s)")

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return outcome_of(mutant, copy)
            finally:
                copies.put(copy)

        found: dict[str, Outcome] = {}
        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(one, mutant) for mutant in mutants]):
                outcome = future.result()
                found[outcome.mutant.name] = outcome
                place, name = f"[{len(found)}/{len(mutants)}]", outcome.mutant.name
                tell(f"{place} {outcome.kind}: {name} ({outcome.seconds:.0f} s) {outcome.detail}")
    return [found[mutant.name] for mutant in mutants]


def outcome_of(mutant: Mutant, copy: Path) -> Outcome:
    """Plant one bug in a copy of the tree, run its tests, and take it out again."""
    begun, file = time.monotonic(), copy / mutant.file
    try:
        planted = mutant.planted(copy)
    except StaleMutantError as error:
        return Outcome(mutant, "stale", str(error))
    whole = file.read_text(encoding="utf-8")
    try:
        _write(file, planted)
        status, output = _pytest(copy, mutant.tests, "--exitfirst")
    except subprocess.TimeoutExpired:
        status, output = 1, f"FAILED no answer in {_LONGEST} s\n"
    finally:
        _write(file, whole)
    seconds = time.monotonic() - begun
    if status == 0:
        kind: Kind = "harmless" if mutant.harmless else "survived"
        return Outcome(mutant, kind, mutant.harmless or mutant.why, seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    if status != 1 or failed is None:
        return Outcome(mutant, "broken", f"pytest ended with {status}: {output[-2000:]}", seconds)
    return Outcome(mutant, "caught", f"by {failed[1]}", seconds)


def _copied(root: Path, to: Path) -> Path:
    """What git tracks, or would, as it lies in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def _write(file: Path, text: str) -> None:
    """Without what Python compiled before: it may tell two texts of one size and second for the same."""
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def _pytest(copy: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Exit status, and what was printed. Raises: subprocess.TimeoutExpired."""
    # One thread a process, as in ``make test``; an installed copy of the library must not be found first.
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "--tb=no", *options, *tests]
    ended = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=_LONGEST
    )
    return ended.returncode, ended.stdout + ended.stderr
