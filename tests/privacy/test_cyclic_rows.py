"""Rows of correlated noise in a ledger: alike but for the group, which is row mod bands; and what they cost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import ConfigError
from dptune.privacy.accountants import gdp_clt_epsilon, pld_epsilon, rdp_epsilon
from dptune.privacy.accounting.renyi_filter import RenyiFilter
from dptune.privacy.accounting.strategy import optimised, square_root, visits
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import GENESIS, LedgerError, read_ledger, seal
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader

BANDS, RATE, SIGMA = 8, 8 * 64 / 4576, 1.23257
STRATEGY = optimised(BANDS, 72)
#: Epsilon of the reference run after so many rows.
PRICES = {1: 1.141, 9: 1.3216, 25: 1.5687, 36: 1.6689, 72: 2.0000, 73: 2.0717}


def header(**changes: Any) -> RunHeader:
    values: dict[str, Any] = {"epsilon": None, "delta": 1e-5, "unit": "record", "units": 4576}
    return RunHeader("banded", "bandmf", "certified", **(values | changes))


def row(number: int, **changes: Any) -> Release:
    values: dict[str, Any] = {"sample_rate": RATE, "noise_multiplier": SIGMA, "coefficients": STRATEGY}
    release = {"part": number % BANDS} | values | changes
    return Release(**release)


def charged(path: Path, rows: int, **changes: Any) -> Path:
    with Ledger.create(path, header(), Counter()) as ledger:
        for number in range(rows):
            ledger.charge(row(number, **changes))
    return path


def forged(path: Path, releases: list[Release]) -> Path:
    """A ledger that no ``Ledger`` would write, with right checksums."""
    chain, lines = GENESIS, []
    records = [{"kind": "run", **header().to_dict()}]
    records += [{"kind": "release", "step": step, **one.to_dict()} for step, one in enumerate(releases)]
    for record in records:
        line, chain = seal(json.dumps(record, sort_keys=True, separators=(",", ":")), chain)
        lines.append(line)
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(("rows", "epsilon"), PRICES.items())
def test_a_ledger_alone_prices_the_rows_so_far(tmp_path: Path, rows: int, epsilon: float) -> None:
    """The numbers are to 1 in 10^4 of sigma; epsilon moves by 3 in 10^4 with that."""
    found = read_ledger(charged(tmp_path / "ledger.jsonl", rows)).epsilons
    assert found.certified == pytest.approx(epsilon, rel=1e-3)
    assert found.certified == found.noise_only == found.published


def test_the_price_is_that_of_the_unit_that_was_met_most(tmp_path: Path) -> None:
    """Of 25 rows of 8 bands group 0 has 4: so many Gaussian releases at 8 times the sample rate, and no more."""
    found = read_ledger(charged(tmp_path / "ledger.jsonl", 25))
    assert found.epsilons.certified == pld_epsilon(Counter({Release(RATE, SIGMA): 4}), 1e-5)
    assert found.epsilons.certified < pld_epsilon(Counter({Release(RATE, SIGMA): 25}), 1e-5)


def test_the_multiplier_is_no_multiplier_of_a_step_of_the_whole_data() -> None:
    """What the same noise would be claimed to cost, wrongly, at rate q in each of 72 steps; and other bounds."""
    rows = Counter({Release(RATE, SIGMA): 9})
    assert pld_epsilon(Counter({Release(RATE / BANDS, SIGMA): 72}), 1e-5) == pytest.approx(0.530, abs=2e-3)
    assert pld_epsilon(Counter({Release(RATE, 0.77667): 9}), 1e-5) == pytest.approx(5.058, rel=2e-3)
    assert rdp_epsilon(rows, 1e-5) == pytest.approx(2.406, abs=2e-3)
    assert gdp_clt_epsilon(rows, 1e-5) == pytest.approx(1.232, abs=2e-3)


def test_a_release_survives_its_file_and_others_are_written_as_ever(tmp_path: Path) -> None:
    assert Release.from_dict(json.loads(json.dumps(row(3).to_dict()))) == row(3)
    assert "coefficients" not in Release(0.1, 1.0).to_dict()
    contents = read_ledger(charged(tmp_path / "ledger.jsonl", 9))
    assert contents.composition == Counter(row(number) for number in range(9))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"noise": "none", "noise_multiplier": 0.0}, "coefficients"),
        ({"norm": "l1"}, "coefficients"),
        ({"adaptive": True}, "coefficients"),
        ({"part": None}, "part"),
        ({"part": 8}, "part"),
        ({"sensitivity": 0.99}, "sensitivity"),
        ({"coefficients": tuple(2 * one for one in STRATEGY)}, "sensitivity"),
        ({"coefficients": STRATEGY[::-1]}, "coefficients"),
        ({"sample_rate": 1.1}, "sample_rate"),
    ],
)
def test_a_row_that_no_proof_covers_is_no_release(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        row(3, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize("written", [[], "8", [1, "2"], [0.5, True], {}, None])
def test_a_strategy_in_a_file_is_a_list_of_numbers(written: Any) -> None:
    with pytest.raises(ConfigError, match="coefficients"):
        Release.from_dict(row(3).to_dict() | {"coefficients": written})


def test_a_strategy_that_is_not_normalised_costs_what_its_norm_says() -> None:
    double = tuple(2 * one for one in STRATEGY)
    loud = row(3, coefficients=double, sensitivity=2.0, noise_multiplier=2 * SIGMA)
    assert loud.effective_noise_multiplier == pytest.approx(SIGMA)


WRONG: dict[str, list[Release]] = {
    "of another group": [row(0), row(1), row(3)],
    "again": [row(0), row(1), row(1)],
    "that begins later": [row(1)],
    "of another strategy": [row(0), row(1, coefficients=square_root(8), sensitivity=1.0)],
    "of fewer bands": [row(0), row(1, coefficients=square_root(4))],
    "with less noise": [row(0), row(1, noise_multiplier=1.0)],
    "with more noise": [row(0), row(1, noise_multiplier=2.0)],
    "at another rate": [row(0), row(1, sample_rate=RATE / 2)],
    "of another sensitivity": [row(0), row(1, sensitivity=1.5)],
    "without a strategy": [row(0), Release(RATE, SIGMA)],
    "after independent ones": [Release(RATE, SIGMA), row(1)],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_out_of_turn_is_neither_charged_nor_read(tmp_path: Path, name: str) -> None:
    *right, wrong = WRONG[name]
    with Ledger.create(tmp_path / "charged.jsonl", header(), Counter()) as ledger:
        for release in right:
            ledger.charge(release)
        with pytest.raises(LedgerError, match=r"the next release .* Fix: "):
            ledger.charge(wrong)
    assert read_ledger(tmp_path / "charged.jsonl").releases == len(right)
    with pytest.raises(LedgerError, match=f"line {len(right) + 2}: "):
        read_ledger(forged(tmp_path / "forged.jsonl", WRONG[name]))


def test_a_resumed_ledger_goes_on_where_it_was(tmp_path: Path) -> None:
    path = charged(tmp_path / "ledger.jsonl", 11)
    with Ledger.resume(path, Counter()) as ledger:
        with pytest.raises(LedgerError, match="is about group 0, where row 11 of 8 bands is about group 3"):
            ledger.charge(row(0))
        ledger.charge(row(11))
    assert read_ledger(path).releases == 12


@pytest.mark.parametrize("bands", [1, 8, 64])
def test_a_budget_is_kept_to_the_last_row_and_no_further(tmp_path: Path, bands: int) -> None:
    """Many parts are priced as exactly as one: a plan at the very edge of its budget is accepted, a row more is not."""
    strategy = square_root(bands) if bands > 1 else ()

    def one(number: int, noise: float = 1.0) -> Release:
        part = number % bands if strategy else None
        return Release(min(1.0, bands * 0.01), noise, coefficients=strategy, part=part)

    rows = visits(128, bands)
    plan: Composition = Counter({one(group): count for group, count in enumerate(rows)})
    exact = pld_epsilon(Counter({replace(one(0), part=None, coefficients=()): rows[0]}), 1e-5)
    assert header().price(plan).certified == exact
    with Ledger.create(tmp_path / "ledger.jsonl", header(epsilon=exact), plan) as ledger:
        for number in range(128):
            ledger.charge(one(number))
        with pytest.raises(BudgetError):
            ledger.charge(one(128))


def test_rows_are_not_inherited_and_no_filter_prices_them() -> None:
    with pytest.raises(ConfigError, match="inherited"):
        header(inherited=((row(0), 1),))
    assert RenyiFilter(2.0, 1.0).cost(row(0)) == float("inf")
