"""The list of planted bugs fits the code, and the run that uses it tells caught from survived."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import ROOT, Mutant, StaleMutantError
from tests.mutants.runner import UnsoundTestsError, run

DOUBLED = Mutant("doubled", "two is not one", "one.py", "return 1", "return 2", ("test_one.py::test_it",))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_code_and_names_tests_that_exist(mutant: Mutant) -> None:
    planted = mutant.planted(ROOT)
    if mutant.file.endswith(".py"):
        ast.parse(planted)
    assert planted != source(mutant.file)
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert not function or f"\ndef {function.partition('[')[0]}(" in source(file), test
    assert mutant.why


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_names_are_unique_and_there_are_enough() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    for folder in ("privacy", "mechanisms", "training", "prediction", "policy"):
        assert sum(mutant.file.startswith(f"dptune/{folder}/") for mutant in MUTANTS) >= 10


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one function and its test."""
    (tmp_path / "one.py").write_text("def one() -> int:\n    return 1\n")
    (tmp_path / "test_one.py").write_text(
        "from one import one\n\n\ndef test_it() -> None:\n    assert one() == 1\n\n\n"
        "def test_wrong() -> None:\n    assert one() == 3\n\n\n"
        "def test_all() -> None:\n    assert one()\n"
    )
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def test_the_run_tells_what_is_caught_and_leaves_the_tree_alone(tree: Path) -> None:
    survivor = replace(DOUBLED, name="survivor", tests=("test_one.py::test_all",))
    mutants = [
        DOUBLED,
        survivor,
        replace(survivor, name="excused", harmless="any truth will do"),
        replace(DOUBLED, name="stale", old="return 7"),
        replace(DOUBLED, name="broken", new="return 2)"),
        # What the first two left must not show in the last: a file of one size, changed within a second.
        replace(DOUBLED, name="again", new="return 3", tests=("test_one.py::test_it",)),
    ]
    told: list[str] = []
    outcomes = run(tree, mutants, 1, told.append, imported=())
    assert [outcome.kind for outcome in outcomes] == ["caught", "survived", "harmless", "stale", "broken", "caught"]
    assert [outcome.fails for outcome in outcomes] == [False, True, False, True, True, False]
    assert outcomes[0].detail == "by test_one.py::test_it"
    assert len(told) == 2 + len(mutants)
    assert "return 1" in (tree / "one.py").read_text()


def test_a_test_that_fails_without_a_bug_shows_nothing(tree: Path) -> None:
    with pytest.raises(UnsoundTestsError, match="do not pass without any bug"):
        run(tree, [replace(DOUBLED, tests=("test_one.py::test_wrong",))], 1, lambda line: None, imported=())


def test_an_old_text_that_is_twice_in_its_file_is_stale(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("return 1, return 1")
    with pytest.raises(StaleMutantError, match=r"2 times in one\.py"):
        DOUBLED.planted(tmp_path)
