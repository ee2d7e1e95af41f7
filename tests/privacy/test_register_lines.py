"""The lines of a register: numbered and chained, so that whatever happens to one of them is named."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from test_certificate import RELEASE, certificate, header
from typer.testing import CliRunner

from dptune.cli import app
from dptune.privacy.ledger_file import GENESIS, LedgerError, encode, seal
from dptune.privacy.spent_budgets.register import Register
from dptune.privacy.spent_budgets.register_file import DamagedRegisterError, read_lines, unnumbered

Lines = list[bytes]


def written(path: Path, runs: int = 4) -> Lines:
    """A register of some runs: line 1 is its own, line n the run n - 1."""
    register = Register(path)
    for number in range(runs):
        register.add_run("people", header(run_id=f"run {number + 1}"), Counter({RELEASE: 40}))
    return path.read_bytes().splitlines(keepends=True)


def resealed(lines: Lines, *, numbers: bool = True) -> bytes:
    """The same records with new checksums, as someone would write them who knows the format."""
    chain, found = GENESIS, b""
    for line in lines:
        record = json.loads(line)
        del record["chain"]
        if not numbers:
            del record["number"]
        sealed, chain = seal(encode(record), chain)
        found += sealed
    return found


def test_each_line_states_its_number_and_the_checksum_of_all_before_it(tmp_path: Path) -> None:
    lines = written(tmp_path / "spent.jsonl")
    assert [json.loads(line)["number"] for line in lines] == [1, 2, 3, 4, 5]
    assert b"".join(lines) == resealed(lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own, a, b, c, d: [own, b, c, d], "line 2: says that it is line 3: a line above it is missing"),
        (lambda own, a, b, c, d: [own, d], "line 2: says that it is line 5: 3 lines above it are missing"),
        (lambda own, a, b, c, d: [a, b, c, d], "line 1: says that it is line 2: a line above it is missing"),
        (lambda own, a, b, c, d: [own, a, a, b, c, d], "line 3: says that it is line 2: it is repeated, or out"),
        (lambda own, a, b, c, d: [own, a, b, c, d, d], "line 6: says that it is line 5: it is repeated, or out"),
        (lambda own, a, b, c, d: [own, b, a, c, d], "line 2: says that it is line 3: a line above it is missing"),
        (lambda own, a, b, c, d: [own, a, b, d, c], "line 4: says that it is line 5: a line above it is missing"),
        (lambda own, a, b, c, d: [own, a.replace(b",40]", b",20]"), b, c, d], "line 2: was edited"),
        (lambda own, a, b, c, d: [own, a, b, c, d.replace(b",40]", b",20]")], "line 5: was edited"),
        (lambda own, a, b, c, d: [own, a, b.replace(b'"number":3', b'"number":4'), c, d], "line 3: says that it is"),
        (lambda own, a, b, c, d: [own, a, b"\n", b, c, d], "line 3: was edited"),
        (lambda own, a, b, c, d: [own, a, b.replace(b'"number":3,', b""), c, d], "line 3: has no number, and the line"),
        (lambda own, a, b, c, d: [own.replace(b'"salt":"', b'"salt":"0'), a, b, c, d], "line 1: was edited"),
    ],
)
def test_whatever_happens_to_a_line_is_named(change: Callable[..., Lines], said: str, tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    content = b"".join(change(*written(path)))
    path.write_bytes(content)
    for call in (Register(path).totals, lambda: Register(path).add_search("people", certificate())):
        with pytest.raises(LedgerError, match=said) as refused:
            call()
        assert "Fix: restore a copy of it; if you have none, move it away" in str(refused.value)
    assert path.read_bytes() == content, "nothing is mended in silence"
    shown = CliRunner().invoke(app, ["spent", str(path)])
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert said in shown.stderr.strip().splitlines()[-1]


def test_lines_that_were_sealed_again_are_found_by_their_numbers(tmp_path: Path) -> None:
    """A checksum is no signature; who takes a line out and seals the rest must number it anew too."""
    path = tmp_path / "spent.jsonl"
    lines = written(path)
    for changed in ([lines[0], *lines[2:]], [*lines[:3], lines[2], *lines[3:]], [lines[0], lines[2], lines[1]]):
        path.write_bytes(resealed(changed))
        with pytest.raises(DamagedRegisterError, match="says that it is line"):
            Register(path).totals()


def test_a_register_of_an_earlier_version_is_read_and_gets_numbers_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    path.write_bytes(resealed(written(path), numbers=False))
    before = path.read_bytes()
    assert unnumbered(path) == 5
    assert Register(path).totals()[0].entries == 4
    Register(path).add_run("people", header(run_id="new"), Counter({RELEASE: 40}))
    assert path.read_bytes().startswith(before)
    assert [line.get("number") for line in read_lines(path)] == [None] * 5 + [6]
    assert Register(path).totals()[0].entries == 5
    told = CliRunner().invoke(app, ["spent", str(path), "--json"])
    assert "5 lines have no number: an earlier version wrote them" in json.loads(told.stdout)["note"]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(LedgerError, match="line 2: was edited"):
        Register(path).totals()
    path.write_bytes(b"".join([*lines[:4], lines[5]]))
    with pytest.raises(LedgerError, match="line 5: says that it is line 6: a line above it is missing"):
        Register(path).totals()


def test_a_register_with_numbers_throughout_says_nothing_of_earlier_versions(tmp_path: Path) -> None:
    written(tmp_path / "spent.jsonl")
    assert "no number" not in CliRunner().invoke(app, ["spent", str(tmp_path / "spent.jsonl")]).stdout


def add(path: Path, numbers: list[int]) -> None:
    for number in numbers:
        Register(path).add_run("people", header(run_id=str(number)), Counter({RELEASE: 40}))


def test_processes_that_write_at_once_number_their_lines_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    with ProcessPoolExecutor(3, get_context("fork")) as pool:
        list(pool.map(add, [path] * 3, [[0, 1, 2], [2, 3, 4], [4, 0, 5]]))
    assert [line["number"] for line in read_lines(path)] == list(range(1, 8))
    assert Register(path).totals()[0].entries == 6


@pytest.mark.parametrize("kept", [1, 60, -2])
def test_a_line_that_was_torn_gives_its_number_to_the_next(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "spent.jsonl"
    *whole, last = written(path)
    path.write_bytes(b"".join(whole) + last[:kept])
    Register(path).add_run("people", header(run_id="another"), Counter({RELEASE: 40}))
    assert [line["number"] for line in read_lines(path)] == [1, 2, 3, 4, 5]
    assert read_lines(path)[-1]["id"] == "another"
