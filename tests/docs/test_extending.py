"""The recipes of docs/howto/extending.md, applied to a copy of the repository; then their checks and commands run."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import DOCS, ROOT, blocks, commands

from tests.forked import command as module_command
from tests.forked import forked

PAGE = DOCS / "howto" / "extending.md"
BLOCKS = blocks(PAGE.read_text(encoding="utf-8"))
CHECKS = [block for block in BLOCKS if block.info == 'title="check"']
COMMANDS = [line for block in BLOCKS if block.language == "sh" for line in commands(block.code)]
KINDS = (
    "clipper",
    "mechanism",
    "optimiser",
    "format",
    "metric",
    "attack",
    "chart",
    "setting",
    "Prefect form",
    "family",
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's code in which a reader has followed every recipe, from the first to the last."""
    root = tmp_path_factory.mktemp("followed") / "dptune"
    root.mkdir()
    for name in ("dptune", "tasks", "flows"):
        shutil.copytree(ROOT / name, root / name)  # with what Python compiled, which it need not do again
    shutil.copy(ROOT / "params.yaml", root)
    for block in BLOCKS:
        title = re.fullmatch(r'title="(.+\.py)"', block.info)
        if title:
            assert not (root / title[1]).exists(), f"{title[1]} exists already"
            (root / title[1]).write_text(block.code, encoding="utf-8")
        elif block.language == "diff":
            done = subprocess.run(
                ["git", "apply", "--verbose", "-"],
                cwd=root, input=block.code, capture_output=True, text=True, check=False,
                env=os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)},
            )  # fmt: skip
            assert done.returncode == 0, f"extending.md, line {block.line}: {done.stderr}"
    return root


def _run(root: Path, work: Callable[[], None]) -> None:
    status, output, errors = forked(work, root, packages=root)
    assert status == 0, output + errors


def test_every_kind_has_a_recipe() -> None:
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert not [kind for kind in KINDS if not any(kind in heading for heading in headings)]


def test_what_the_recipes_add_uses_no_name_that_is_not_there(copy: Path) -> None:
    done = subprocess.run(
        ["ruff", "check", "--isolated", "--select", "F,E9", str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_what_a_reader_of_the_recipes_added_is_there(copy: Path) -> None:
    files = []
    for place, block in enumerate(CHECKS):
        files.append(copy / f"check_{place}_of_line_{block.line}.py")
        files[-1].write_text(block.code, encoding="utf-8")
    assert len(files) >= 7
    _run(copy, lambda: [runpy.run_path(str(file)) for file in files])


@pytest.mark.one_case
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_recipes_runs(copy: Path, command: str) -> None:
    program, *arguments = command.split()
    assert program == "dptune"
    _run(copy, module_command("dptune.cli", *arguments))
