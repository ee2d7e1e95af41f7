"""Command lines that went wrong: status 0, or status 2 and a sentence; never a traceback."""

from __future__ import annotations

import random
import re

import pytest
from typer.testing import CliRunner

from dptune.cli import app
from dptune.mechanisms.registry import MECHANISMS

RUNNER = CliRunner()
NUMBERS = (
    "0",
    "-1",
    "1",
    "0.5",
    "1e-8",
    "1e-300",
    "1e300",
    "1e308",
    "5e-324",
    "nan",
    "inf",
    "-inf",
    "",
    "x",
    "1e9",
    "9" * 400,
    "é",
)
OPTIONS = (
    "noise_multiplier",
    "max_grad_norm",
    "pairs",
    "r",
    "interval",
    "target",
    "k",
    "theta",
    "nosuch",
    "clipper",
    "",
)


def command(coins: random.Random) -> list[str]:
    """A plausible command line with one to three entries replaced by nonsense."""
    entries = {"--delta": "1e-5", "--sample-rate": "0.01", "--steps": "20"}
    options = {"noise_multiplier": "1"}
    for _ in range(coins.randint(1, 3)):
        if coins.random() < 0.4:
            entries[coins.choice(list(entries))] = coins.choice(NUMBERS)
        else:
            options[coins.choice(OPTIONS)] = coins.choice(NUMBERS)
    name = coins.choice([*MECHANISMS, "pmixed", "dppg", "nosuch", "\udcff"])
    sets = [f"--set={key}={value}" for key, value in options.items()]
    return ["account", name, *(text for pair in entries.items() for text in pair), *sets]


def test_no_command_line_gives_a_traceback() -> None:
    """Seed 23, 250 command lines."""
    coins, ended = random.Random(23), []
    for _ in range(250):
        line = command(coins)
        found = RUNNER.invoke(app, line)
        assert found.exception is None or isinstance(found.exception, SystemExit), (line, found.exception)
        assert found.exit_code in (0, 2), line
        assert found.exit_code == 0 or found.stderr.splitlines()[-1].count("Fix: ") == 1, (line, found.output)
        ended.append(found.exit_code)
    assert {0, 2} <= set(ended)


@pytest.mark.parametrize("multiplier", ["1e-10", "1e-300", "1e300", "5e-324"])
@pytest.mark.parametrize("line", ["account psac --sample-rate 0.01 --steps 20 --delta 1e-5", "audit psac --trials 500"])
def test_a_noise_that_no_machine_number_holds_is_refused(line: str, multiplier: str) -> None:
    found = RUNNER.invoke(app, [*line.split(), "--set", f"noise_multiplier={multiplier}"])
    assert found.exit_code == 2
    assert re.search(r"noise_multiplier: .*\[1e-09, 1e\+09\]\. Fix: ", found.output)


def test_an_option_is_given_once() -> None:
    """Seed 24: any option, twice, with the same value or another."""
    coins = random.Random(24)
    for _ in range(200):
        key = coins.choice([option for option in OPTIONS if option])
        values = coins.choices(["1", "2", "0.5"], k=2)
        line = ["account", "static", "--delta", "1e-5", "--sample-rate", "0.01", "--steps", "20"]
        found = RUNNER.invoke(app, [*line, *(f"--set={key}={value}" for value in values)])
        assert found.exit_code == 2
        assert f"--set {key}: is given twice. Fix: give it once" in found.output
