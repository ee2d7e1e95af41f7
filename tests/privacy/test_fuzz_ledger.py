"""Ledgers that were tampered with: refused with the line, whoever knows the checksums or not."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader

VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 5, 10**40, 1e308, 1e-308, 5e-324, True, None, "", "x", "\0", [], [[]], [1], {}, {"x": 1}, [None, 2]),
)


def whole(path: Path) -> list[dict[str, Any]]:
    header = RunHeader("static", "gdp_clt", "certified", None, 1e-5, "record", 10)
    with Ledger.create(path, header, Counter()) as ledger:
        for noise in (1.0, 2.0, 1.0, 3.0):
            ledger.charge(Release(0.1, noise))
        ledger.finish()
    return [json.loads(line) for line in path.read_text().splitlines()]


def rechained(lines: list[dict[str, Any]]) -> str:
    """The lines as somebody would write them who knows how checksums are made."""
    chain, text = "0" * 64, ""
    for line in lines:
        body = json.dumps({k: v for k, v in line.items() if k != "chain"}, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256((chain + body).encode()).hexdigest()
        text += f'{body[:-1]},"chain":"{chain}"}}\n'
    return text


def outcome(path: Path) -> str:
    """What reading and pricing it gives: accepted, or the message."""
    try:
        contents = read_ledger(path)
    except LedgerError as error:
        return str(error)
    assert contents.epsilons.certified >= 0
    return "accepted"


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    """Seed 30, 300 edits of bytes by somebody who leaves the checksums alone; no edit is accepted."""
    path, coins = tmp_path / "ledger.jsonl", random.Random(30)
    whole(path)
    good = path.read_bytes()
    lines = good.splitlines(keepends=True)
    for _ in range(300):
        place, number = coins.randrange(len(good)), coins.randrange(len(lines))
        edits = (
            good[:place] + bytes([good[place] ^ coins.randrange(1, 256)]) + good[place + 1 :],
            good[:place] + coins.choice((b"\n", b"{", b"\0", b"\xff", b"}" * 3000, b"[" * 3000)) + good[place:],
            b"".join([*lines[: number + 1], *lines[number:]]),  # a line twice
            b"".join([*lines[:number], *lines[number + 1 :]]) if number < len(lines) - 1 else good + b"x",
        )
        path.write_bytes(coins.choice(edits))
        assert ", line " in outcome(path)


def test_a_line_of_nonsense_with_right_checksums_gives_no_traceback(tmp_path: Path) -> None:
    """Seed 31, 300 values of every key, checksums made anew."""
    path, coins = tmp_path / "ledger.jsonl", random.Random(31)
    lines = whole(path)
    found = []
    for _ in range(300):
        number = coins.randrange(len(lines))
        key = coins.choice(sorted(lines[number]))
        changed = [*lines[:number], {**lines[number], key: coins.choice(VALUES)}, *lines[number + 1 :]]
        path.write_text(rechained(changed))
        found.append(outcome(path))
    assert sum(", line " in one for one in found) > 100


@pytest.mark.parametrize("written", [4, 7, "5", None, True])
def test_another_format_has_one_fix(tmp_path: Path, written: Any) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = whole(path)
    path.write_text(rechained([{**lines[0], "format": written}, *lines[1:]]))
    said = outcome(path)
    assert f", line 1: format: {written!r} is not one of the formats 5 to 6" in said
    assert said.count("Fix: ") == 1
    assert said.endswith("Fix: verify it with the dptune that wrote it, and keep the file as it is.")
