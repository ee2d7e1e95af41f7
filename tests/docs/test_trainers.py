"""The page of released trainers: every command prints the numbers that stand beside it and in the table."""

from __future__ import annotations

import json
import math
import re
import shlex

import pytest
from pages import DOCS
from typer.testing import CliRunner

from dptune.cli import app

TEXT = (DOCS / "findings" / "trainers.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^dptune (\w+ .*?) +# row (\d+): (.*)$", TEXT, re.M)
ACCOUNTS = [one for one in COMMANDS if one[0].startswith("account")]
CALIBRATIONS = [one for one in COMMANDS if one[0].startswith("calibrate")]


def printed(command: str) -> dict[str, float]:
    done = CliRunner().invoke(app, [*shlex.split(command), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, float] = json.loads(done.stdout)
    return found


def cells(row: str) -> list[str]:
    (line,) = re.findall(rf"^\| {row} \|.*$", TEXT, re.M)
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("command", "row", "shown"), ACCOUNTS, ids=[f"{row}-{shown}" for _, row, shown in ACCOUNTS])
def test_a_row_is_what_its_command_prints(command: str, row: str, shown: str) -> None:
    """Rounded down at the lower end, and up at the upper one."""
    found = printed(command)
    least, most = cells(row)[4:6]
    low = f"{math.floor(100 * found['epsilon_at_least']) / 100:.2f}"
    high = f"{math.ceil(100 * found['epsilon_certified']) / 100:.2f}"
    assert shown in (f"{low} to {high}", f"{low} at least", f"{high} at most")
    if "most" not in shown:
        assert least == low
    if "least" not in shown:
        assert most == high


@pytest.mark.long
@pytest.mark.parametrize(("command", "row", "shown"), CALIBRATIONS, ids=[row for _, row, _ in CALIBRATIONS])
def test_the_noise_of_a_row_is_calibrated(command: str, row: str, shown: str) -> None:
    noise = printed(command)["noise_multiplier"]
    assert f"{noise:.4f}" == shown
    used = {re.search(r"noise_multiplier=([\d.]+)", other)[1] for other, its, _ in ACCOUNTS if its == row}  # type: ignore[index]
    assert {f"{float(one):.4f}" for one in used} == {shown}


def test_every_row_with_numbers_has_a_command_and_a_paragraph() -> None:
    rows = re.findall(r"^\| (\d+) \|", TEXT, re.M)
    assert len(rows) >= 12
    with_numbers = {row for row in rows if re.search(r"\d\.\d", "".join(cells(row)[4:6]))}
    assert with_numbers == {row for _, row, _ in ACCOUNTS}
    paragraphs = TEXT.split("## Where each row was read")[1]
    assert re.findall(r"^(\d+)\. ", paragraphs, re.M) == rows
