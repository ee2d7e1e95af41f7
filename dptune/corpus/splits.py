"""Attack, train and eval sides, by encounter or by patient (spec rldp.md, section 2, DEFECT A).

A unit's side is a keyed hash of its own key and of nothing else: whoever joins or leaves the table moves nobody. A
permutation of the records would deal up to half of all memberships again when one record leaves, which no epsilon
covers.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa

from dptune.corpus.records import Records, read_records, write_records
from dptune.corpus.text import SOURCE as TEXT
from dptune.errors import ConfigError

UNITS = ("encounter", "patient")
SIDES = ("attack", "train", "eval")
_HASHES = 2**64
#: Where attack and train end: 20 % and 72 % of all hashes.
_ENDS = (_HASHES * 20 // 100, _HASHES * 92 // 100)


def side_of(key: int, seed: int, unit: str) -> str:
    """The side of the unit whose own key (in 64 bits, signed) is ``key``. It depends on nobody else.

    Args:
        seed: public. Whoever knows a unit's key knows its side.
        unit: "encounter" or "patient"; an encounter and a patient of equal number are dealt independently.
    """
    named = blake2b(
        key.to_bytes(8, "little", signed=True),
        digest_size=8,
        key=_hash_key(seed),
        person=unit.encode(),
    )
    return SIDES[sum(int.from_bytes(named.digest(), "little") >= end for end in _ENDS)]


@lru_cache
def _hash_key(seed: int) -> bytes:
    """64 bytes, the most that BLAKE2 takes, of a seed of any length."""
    return blake2b(str(seed).encode()).digest()


def split(keys: np.ndarray, seed: int, unit: str) -> dict[str, np.ndarray]:
    """The rows of each side, in ascending order.

    A unit is attack with chance 20 %, train with 72 %, eval with 8 %. Sizes vary as those of independent draws do: of
    101,766 encounters about 73,271 train, give or take 143 (one standard deviation). The number of units on each side
    is public.

    Args:
        keys: (rows,) the own key of the unit that each row belongs to, from the table and not from its order.
        seed: public.

    Raises: ConfigError for an unknown unit, or a side without a unit.
    """
    if unit not in UNITS:
        raise ConfigError("split.unit", f"{unit!r} is unknown", fix=f"use one of {', '.join(UNITS)}")
    units, owners = np.unique(keys, return_inverse=True)
    sides = np.array([SIDES.index(side_of(key, seed, unit)) for key in units.tolist()], dtype=np.int64)[owners]
    rows = {name: np.flatnonzero(sides == number) for number, name in enumerate(SIDES)}
    empty = [name for name in SIDES if not len(rows[name])]
    if empty:
        problem = f"{len(units)} {unit}s leave no one on the side {empty[0]}"
        raise ConfigError("split.unit", problem, fix="use 100 or more, or another data.split_seed")
    return rows


def keys_of(records: Records, unit: str) -> np.ndarray:
    """(records,) the own key of each record's unit.

    A paragraph of a text file has no number of its own: its key is its text, so that equal ones share a side.
    """
    return records.patient if unit == "patient" or records.about["source"] == TEXT else records.record


def write_splits(narratives: Path, directory: Path, seed: int, unit: str) -> None:
    """Write attack.parquet, train.parquet and eval.parquet into ``directory``, with the columns and the
    metadata of ``narratives`` plus unit and split.

    Raises: DataError for unreadable narratives; ConfigError as :func:`split`.
    """
    whole = read_records(narratives)
    for name, rows in split(keys_of(whole, unit), seed, unit).items():
        about = {**whole.about, "unit": unit, "split": name}
        text = whole.text.take(pa.array(rows))
        write_records(directory / f"{name}.parquet", Records(whole.record[rows], whole.patient[rows], text, about))
