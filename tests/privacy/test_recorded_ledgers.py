"""Ledgers that were written before stay readable, and cost what they cost then: their bytes are in ``recorded``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import LedgerError, read_ledger

RECORDED = Path(__file__).parent / "recorded"
#: Published, noise only and certified, as this dptune priced them when they were recorded.
PRICES = {
    "static": (0.10375344994749376, 0.6677218664048842, 0.6677218664048842),
    "plrvo": (0.4844340665902965, 5.216261242958829, 5.216261242958829),
    "lmo_dp": (0.044678932940125565, 0.01711224805528731, 0.01711224805528731),
    "rldp_published": (0.10375344994749376, 0.6677218664048842, math.inf),
    "laplace": (0.011844958107796929, 0.011844958107796929, 0.011844958107796929),
    "rldp": (0.19915992830689613, 1.8684045982436384, 1.8684045982436384),
    "inherited": (0.08308063804300331, 0.6957767607761257, 0.6957767607761257),
    "dppg": (5.000371340556759, 4.377178100059411, 4.377178100059411),
    "pmixed": (7.999999999996801, 7.999999999996801, 7.999999999996801),
    "banded": (7.999721028603814, 7.999721028603814, math.inf),  # certified then, of units that keep their rank
}


def test_every_recorded_ledger_has_its_prices() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(PRICES)


@pytest.mark.parametrize("name", PRICES)
def test_a_recorded_ledger_verifies_to_the_same_epsilons(name: str) -> None:
    contents = read_ledger(RECORDED / f"{name}.jsonl")
    assert contents.complete
    assert (contents.epsilons.published, contents.epsilons.noise_only, contents.epsilons.certified) == pytest.approx(
        PRICES[name], rel=1e-9
    )


def test_a_ledger_of_format_5_says_record_and_is_not_resumed(tmp_path: Path) -> None:
    """Its word for a record was another; what it spent is added to what newer runs on the same records spend."""
    whole = (RECORDED / "static.jsonl").read_bytes()
    assert b'"format":5' in whole
    assert b'"unit":"encounter"' in whole
    unfinished = tmp_path / "ledger.jsonl"
    unfinished.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    found = read_ledger(unfinished)
    assert (found.header.unit, found.complete) == ("record", False)
    with pytest.raises(LedgerError, match=r"is of format 5, which can be verified but not resumed.* Fix: "):
        Ledger.resume(unfinished, found.composition)
    assert unfinished.read_bytes() == b"".join(whole.splitlines(keepends=True)[:-1])
