"""The deal of units into groups, and draws from one group at a time."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.training.data import PrivacyUnits, split_batch
from dptune.training.groups import Turn, hash_keys

RUN, OTHER = "a" * 32, "b" * 32


def groups(count: int, bands: int, run_id: str = RUN) -> np.ndarray:
    """(count,) group of each unit."""
    turns = [Turn.of(run_id, bands, row) for row in range(bands)]
    held = np.stack([turn.holds(np.arange(count)) for turn in turns if turn is not None])
    assert (held.sum(axis=0) == 1).all(), "a unit is in no group, or in two"
    return held.argmax(axis=0)


def test_every_unit_is_in_one_group_and_groups_are_even() -> None:
    """Sizes of 8 groups of 4,576: binomial, six standard deviations; false alarm 2e-8."""
    sizes = np.bincount(groups(4576, 8))
    assert np.abs(sizes - 572).max() < 6 * (4576 * 7 / 64) ** 0.5


def test_the_deal_follows_from_the_runs_id_and_the_units_own_number() -> None:
    """As the specification has it, written down a second time; so units that come later move nobody."""
    salt = np.frombuffer(hashlib.sha256(RUN.encode()).digest()[:8], dtype=">u8").astype(np.uint64)
    expected = hash_keys(np.arange(100).astype(np.uint64) ^ salt) % np.uint64(5)
    assert (groups(100, 5) == expected).all()
    assert (groups(60, 5) == groups(100, 5)[:60]).all()
    assert (groups(100, 5) != groups(100, 5, OTHER)).mean() > 0.6


def test_one_band_has_no_turns() -> None:
    assert Turn.of(RUN, 1, 3) is None


@pytest.mark.parametrize("bands", [2, 5])
def test_a_unit_is_drawn_in_rows_of_its_own_group_alone(bands: int) -> None:
    """Over 40 b rows each of 300 units; and as often as the rate says, within four standard deviations of the total."""
    units, rate, entropy, rows = PrivacyUnits.records(300), 0.3, FixedSeed(1), 40 * bands
    dealt, drawn = groups(300, bands), Counter[int]()
    for row in range(rows):
        for (record,) in units.draw(rate, entropy, Turn.of(RUN, bands, row)):
            assert dealt[record] == row % bands
            drawn[int(record)] += 1
    assert sum(drawn.values()) == pytest.approx(300 * 40 * rate, abs=4 * (300 * 40 * rate * (1 - rate)) ** 0.5)
    assert len(drawn) == 300


def test_at_rate_one_a_group_comes_whole() -> None:
    units = PrivacyUnits.records(50)
    batches = [units.draw(1.0, OsEntropy(), Turn.of(RUN, 3, row)) for row in range(3)]
    assert sorted(int(record) for batch in batches for (record,) in batch) == list(range(50))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_draw_what_one_process_draws(world: int) -> None:
    """Of records and of an auditor's slots, which are numbered after all units whatever the rank."""
    units = PrivacyUnits.records(31).with_slots(np.ones(9, dtype=bool))
    for row in range(4):
        turn = Turn.of(RUN, 4, row)
        alone = [tuple(unit) for unit in units.draw(1.0, OsEntropy(), turn)]
        parts = [units.part(rank, world).draw(1.0, OsEntropy(), turn) for rank in range(world)]
        assert sorted(alone) == sorted(tuple(unit) for part in parts for unit in part)
        _, slots = split_batch(units.draw(1.0, OsEntropy(), turn))
        assert (groups(40, 4)[31 + slots] == row).all()


def test_who_is_absent_moves_nobody() -> None:
    """One unit's slot is emptied: all others are drawn in the rows that they were drawn in."""
    keys = np.array([5, 5, 9, 1, 7, 7, 3])
    everybody = PrivacyUnits.of("patient", keys, 2)
    without = PrivacyUnits.of("patient", keys, 2, keys == 5)
    for row in range(3):
        turn = Turn.of(RUN, 3, row)
        here, there = (
            {int(one) for unit in units.draw(1.0, FixedSeed(0), turn) for one in unit} for units in (everybody, without)
        )
        assert here - there <= {0, 1}
        assert there <= here
