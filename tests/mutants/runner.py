"""Running tests against planted bugs, each in a copy of the tree; the working tree is never touched."""

from __future__ import annotations

import json
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

#: By name, for pytest would else read the file list of every installed package, at every run.
_PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
#: A planted bug may make a test wait for ever; a test that does is a test that fails.
_TIMEOUT = "--timeout=120"
#: What most tests import, and takes longest to; see ``warm.py``.
SLOW = (
    *("torch", "transformers", "peft", "numpy", "scipy.stats", "scipy.optimize", "scipy.integrate", "safetensors"),
    *("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama", "torch.func"),
    *("transformers.models.mistral.modeling_mistral", "dp_accounting.pld.privacy_loss_distribution", "typer.testing"),
    *("dp_accounting.rdp", "hypothesis.strategies", "pyarrow.parquet", "fastapi.testclient", "gymnasium"),
    *("pydantic", "yaml"),
)
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


class Tree:
    """A copy of the repository, and a process that runs pytest in it."""

    def __init__(self, root: Path, copy: Path, imported: Sequence[str]) -> None:
        """Copy what git tracks, or would, as it lies in the working tree; ``imported`` is imported once for all."""
        self.copy = copy
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=root, capture_output=True, check=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        # One thread a process, as in ``make test``; an installed copy of the library must not be found first.
        environment = os.environ | {
            "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py")), "pytest", *_PLUGINS, *imported],
            cwd=copy, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def pytest(self, tests: Sequence[str], *options: str) -> tuple[int, str]:
        """Exit status, and what was printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        quiet = ["--quiet", "--tb=no", _TIMEOUT, "-p", "no:cacheprovider", *(f"-p{plugin}" for plugin in _PLUGINS)]
        print(json.dumps([*quiet, *options, *tests]), file=self._process.stdin, flush=True)
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def outcome(self, mutant: Mutant) -> Outcome:
        """Plant one bug, run its tests, and take it out again."""
        begun, file = time.monotonic(), self.copy / mutant.file
        try:
            planted = mutant.planted(self.copy)
        except StaleMutantError as error:
            return Outcome(mutant, "stale", str(error))
        whole = file.read_text(encoding="utf-8")
        try:
            _write(file, planted)
            status, output = self.pytest(mutant.tests, "--exitfirst")
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

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run(
    root: Path, mutants: Sequence[Mutant], jobs: int, tell: Callable[[str], None], imported: Sequence[str] = SLOW
) -> list[Outcome]:
    """Run the named tests without a bug, then with each; outcomes are in the order of ``mutants``.

    Args:
        tell: is given a line of progress at a time.
        imported: modules outside the repository that every test finds imported, which saves time.

    Raises: UnsoundTestsError.
    """
    with TemporaryDirectory(prefix="dptune mutants ") as folder:
        trees = [Tree(root, Path(folder) / str(job), imported) for job in range(jobs)]
        try:
            with ThreadPoolExecutor(jobs) as pool:
                _check_sound(trees, mutants, pool, tell)
                return _planted(trees, mutants, pool, tell)
        finally:
            for tree in trees:
                tree.close()


def _check_sound(
    trees: Sequence[Tree], mutants: Sequence[Mutant], pool: ThreadPoolExecutor, tell: Callable[[str], None]
) -> None:
    """The named tests pass without any bug; a file's tests stay together."""
    files: dict[str, dict[str, None]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        files.setdefault(test.partition("::")[0], {})[test] = None
    begun, count = time.monotonic(), sum(map(len, files.values()))
    tell(f"{count} tests and files of tests, without any bug ...")
    shares = [[test for file in list(files)[job :: len(trees)] for test in files[file]] for job in range(len(trees))]
    waiting = [pool.submit(tree.pytest, share) for tree, share in zip(trees, shares, strict=True) if share]
    for status, output in (one.result() for one in waiting):
        if status:
            raise UnsoundTestsError(f"{output}\nNamed tests do not pass without any bug. Fix: mend them first.")
    tell(f"... pass ({time.monotonic() - begun:.0f} s)")


def _planted(
    trees: Sequence[Tree], mutants: Sequence[Mutant], pool: ThreadPoolExecutor, tell: Callable[[str], None]
) -> list[Outcome]:
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            return tree.outcome(mutant)
        finally:
            free.put(tree)

    found: dict[str, Outcome] = {}
    for future in as_completed([pool.submit(one, mutant) for mutant in mutants]):
        outcome = future.result()
        found[outcome.mutant.name] = outcome
        place, name = f"[{len(found)}/{len(mutants)}]", outcome.mutant.name
        tell(f"{place} {outcome.kind}: {name} ({outcome.seconds:.0f} s) {outcome.detail}")
    return [found[mutant.name] for mutant in mutants]


def _write(file: Path, text: str) -> None:
    """Without what Python compiled before: it may tell two texts of one size and second for the same."""
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
