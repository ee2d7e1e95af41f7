"""The deal of units into groups, and draws from one group at a time."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.mechanisms.planning import Schedule, calibrated
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed, OsEntropy
from dptune.training.privacy_units import PrivacyUnits, Turn, split_batch

RUN, OTHER = "a" * 32, "b" * 32
ANY_KEY = st.integers(-(2**63) + 1000, 2**63 - 1)


def keys_of(count: int) -> np.ndarray:
    """(count,) keys of units, of 63 bits as sources have them; rising, as units of a column are numbered."""
    return np.sort(np.random.default_rng(5).integers(0, 2**63, count))


def groups(keys: np.ndarray, bands: int, run_id: str = RUN, dealt_by: str = "key") -> np.ndarray:
    """(units,) group of each unit, by all draws at rate one of a run's own units."""
    units, dealt = PrivacyUnits.of("record", keys, 1), np.full(len(keys), -1)
    for row in range(bands):
        for (record,) in units.draw(1.0, OsEntropy(), Turn.of(run_id, bands, row, dealt_by)):
            assert dealt[record] == -1, "a unit is in two groups"
            dealt[record] = row
    assert (dealt >= 0).all(), "a unit is in no group"
    return dealt


def test_every_unit_is_in_one_group_and_groups_are_even() -> None:
    """Sizes of 8 groups of 4,576: binomial, six standard deviations; false alarm 2e-8 each. Keys in a row, and any."""
    for keys in (np.arange(4576), keys_of(4576), -1 - np.arange(4576)):
        sizes = np.bincount(groups(keys, 8))
        assert np.abs(sizes - 572).max() < 6 * (4576 * 7 / 64) ** 0.5


def splitmix(key: int, salt: int) -> int:
    """The hash of one key, written down a second time, in whole numbers."""
    mixed = ((key % 2**64 ^ salt) + 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


@given(st.lists(ANY_KEY, min_size=1, max_size=30), st.integers(2, 40))
def test_the_deal_follows_from_the_runs_id_and_the_units_own_key(keys: list[int], bands: int) -> None:
    salt = int.from_bytes(hashlib.sha256(RUN.encode()).digest()[:8], "big")
    assert groups(np.array(keys), bands).tolist() == [splitmix(key, salt) % bands for key in keys]


def test_another_run_deals_in_another_way() -> None:
    """Of 1,000 units about 4 in 5 are in another of 5 groups: within six standard deviations; false alarm 2e-9."""
    moved = (groups(keys_of(1000), 5) != groups(keys_of(1000), 5, OTHER)).sum()
    assert abs(moved - 800) < 6 * (1000 * 0.16) ** 0.5


@given(
    keys=st.lists(ANY_KEY, min_size=2, max_size=40),
    who=st.integers(0, 39),
    newcomer=st.none() | ANY_KEY,
    kind=st.sampled_from(["record", "customer"]),
    bands=st.integers(2, 9),
)
def test_one_unit_that_leaves_or_is_swapped_moves_nobody(
    keys: list[int], who: int, newcomer: int | None, kind: str, bands: int
) -> None:
    """Nor an auditor's slot, nor on any of three ranks. Equal keys are one customer, and records of one group each."""
    leaving = keys[who % len(keys)]
    place = keys.index(leaving)
    others = [*keys[:place], *([] if newcomer is None else [newcomer]), *keys[place + 1 :]]
    if kind == "customer":
        others = [key for key in others if key != leaving]

    def dealt(present: list[int]) -> Counter[tuple[int, int]]:
        """How often a key's records (or a slot, below all keys) were drawn in each row of a whole round."""
        units = PrivacyUnits.of(kind, np.array(present, dtype=np.int64), len(present) or 1)
        units, found = units.with_slots(np.ones(3, dtype=bool)), Counter[tuple[int, int]]()
        for row in range(bands):
            turn = Turn.of(RUN, bands, row)
            parts = [part for rank in range(3) for part in units.part(rank, 3).draw(1.0, OsEntropy(), turn)]
            assert sorted(map(tuple, parts)) == sorted(map(tuple, units.draw(1.0, OsEntropy(), turn)))
            records, slots = split_batch(parts)
            found.update((present[record], row) for unit in records for record in unit)
            found.update((-(2**64) - int(slot), row) for slot in slots)
        assert found.total() == len(present) + 3
        return found

    before, after = dealt(keys), dealt(others)
    assert {key for key, _ in before - after} <= {leaving}
    assert {key for key, _ in after - before} <= {newcomer}


@pytest.mark.parametrize("dealt_by", ["key", "rank"])
def test_ranks_alone_tell_two_worlds_apart_that_differ_in_one_customer(dealt_by: str) -> None:
    """From one run of certified epsilon 1, is the first customer in the data? 60 runs in either world.

    An attacker who knows everybody's records has chosen them: each points along the coordinate of its own group in the
    world with the customer. Where others move, a row has mass along coordinates that are not its group's. The bound
    allows e / (1 + e) + delta = 73.2 % right guesses; were it tight, 108 of 120 were a false alarm in 200,000. By rank
    all are right.
    """
    everybody = keys_of(300)
    bands, schedule = 4, Schedule(30 / 300, 8, 1e-3)
    entry = {"bands": bands, "strategy": "sqrt"}
    found = calibrated(lambda noise: build("banded", {"noise_multiplier": noise} | entry), 1.0, schedule, "certified")
    points = dict(zip(everybody.tolist(), groups(everybody, bands, dealt_by=dealt_by).tolist(), strict=True))
    entropy = FixedSeed(11)

    def mass_elsewhere(present: np.ndarray) -> float:
        """The mass of a whole run along other coordinates than each row's own."""
        units, noise, total = PrivacyUnits.of("customer", present, 1), copy.deepcopy(found.mechanism.noise), 0.0
        coordinates = np.array([points[key] for key in present.tolist()])
        for row in range(schedule.steps):
            turn = Turn.of(RUN, bands, row, dealt_by)
            drawn = [int(record) for (record,) in units.draw(bands * schedule.sample_rate, entropy, turn)]
            sums = [torch.from_numpy(np.bincount(coordinates[drawn], minlength=bands).astype(np.float64))]
            (noisy,), _ = noise.add_row(sums, [1.0], noise.noise_multiplier, entropy, row)
            total += float(noisy.sum() - noisy[row % bands])
        return total

    # 299 others, three of four of whom a rank moves to another group, drawn in 2 of 8 rows at 0.4: 180, and half of it.
    right = sum((mass_elsewhere(everybody) < 90) + (mass_elsewhere(everybody[1:]) > 90) for _ in range(60))
    assert right == 120 if dealt_by == "rank" else right < 108


def test_ranks_are_those_of_earlier_versions() -> None:
    """A run that one of them began goes on by them: who leaves moves others, whatever the keys."""
    keys, salt = keys_of(60), int.from_bytes(hashlib.sha256(RUN.encode()).digest()[:8], "big")
    dealt = groups(keys, 5, dealt_by="rank")
    assert dealt.tolist() == [splitmix(number, salt) % 5 for number in range(60)]
    assert (groups(keys[1:], 5, dealt_by="rank") != dealt[1:]).sum() > 30
    units = PrivacyUnits.of("record", keys, 1).with_slots(np.ones(4, dtype=bool))
    for row in range(5):
        turn = Turn.of(RUN, 5, row, "rank")
        parts = [unit for rank in (0, 1) for unit in units.part(rank, 2).draw(1.0, OsEntropy(), turn)]
        assert sorted(map(tuple, parts)) == sorted(map(tuple, units.draw(1.0, OsEntropy(), turn)))


def test_units_without_keys_are_never_dealt() -> None:
    """By their numbers, that is; nothing falls back to them."""
    for units in (PrivacyUnits.records(9), PrivacyUnits("customer", [np.arange(3), np.arange(3, 9)], 6)):
        with pytest.raises(ConfigError, match=r"units: have no keys of their own.*make them with PrivacyUnits\.of"):
            units.draw(1.0, OsEntropy(), Turn.of(RUN, 3, 0))
        assert len(units.draw(1.0, OsEntropy())) == len(units)


def test_one_band_has_no_turns() -> None:
    assert Turn.of(RUN, 1, 3) is None


@pytest.mark.parametrize("bands", [2, 5])
def test_a_unit_is_drawn_in_rows_of_its_own_group_alone(bands: int) -> None:
    """Over 40 b rows each of 300 units; and as often as the rate says, within four standard deviations of the total."""
    keys, rate, entropy, rows = keys_of(300), 0.3, FixedSeed(1), 40 * bands
    units, dealt, drawn = PrivacyUnits.of("record", keys, 1), groups(keys, bands), Counter[int]()
    for row in range(rows):
        for (record,) in units.draw(rate, entropy, Turn.of(RUN, bands, row)):
            assert dealt[record] == row % bands
            drawn[int(record)] += 1
    assert sum(drawn.values()) == pytest.approx(300 * 40 * rate, abs=4 * (300 * 40 * rate * (1 - rate)) ** 0.5)
    assert len(drawn) == 300


def test_at_rate_one_a_group_comes_whole() -> None:
    units = PrivacyUnits.of("record", keys_of(50), 1)
    batches = [units.draw(1.0, OsEntropy(), Turn.of(RUN, 3, row)) for row in range(3)]
    assert sorted(int(record) for batch in batches for (record,) in batch) == list(range(50))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_together_draw_what_one_process_draws(world: int) -> None:
    """Of records and of an auditor's slots, which have keys of their own, whatever the rank and the units."""
    units = PrivacyUnits.of("record", keys_of(31), 1).with_slots(np.ones(9, dtype=bool))
    for row in range(4):
        turn = Turn.of(RUN, 4, row)
        alone = [tuple(unit) for unit in units.draw(1.0, OsEntropy(), turn)]
        parts = [units.part(rank, world).draw(1.0, OsEntropy(), turn) for rank in range(world)]
        assert sorted(alone) == sorted(tuple(unit) for part in parts for unit in part)
        _, slots = split_batch(units.draw(1.0, OsEntropy(), turn))
        assert (groups(-(2**63) + np.arange(9), 4)[slots] == row).all()


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
