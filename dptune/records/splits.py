"""Splits records into attack, train and eval sides, by record or by another unit.

A unit's side is a keyed hash of its own key and of nothing else, so a unit that joins or leaves changes nobody's side.
A permutation of the records would change up to half of all sides when one record leaves, which no epsilon covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD, check_unit
from dptune.records.parquet_file import Records, read_records, write_records
from dptune.records.reading.formats import FORMATS

#: Shares of all units, as the paper has them.
SHARES = {"attack": 0.2, "train": 0.72, "eval": 0.08}
SIDES = tuple(SHARES)
_HASHES = 2**64
#: The names of units inside the hash; "unit" for other columns. Changing one would split every corpus anew.
_HASHED_AS = {RECORD: "encounter", "patient": "patient"}


def side_of(key: int, seed: int, unit: str, shares: Mapping[str, float] = SHARES) -> str:
    """The side of the unit whose own key (in 64 bits, signed) is ``key``. It depends on nobody else.

    Args:
        seed: public. Whoever knows a unit's key knows its side.
        unit: name of the kind of unit, 16 bytes at most. Equal keys of different kinds get independent sides.
        shares: share of the units by side; they add up to 1.
    """
    named = blake2b(
        key.to_bytes(8, "little", signed=True),
        digest_size=8,
        key=blake2b(str(seed).encode()).digest(),  # 64 bytes, the most that it takes, of a seed of any length
        person=unit.encode(),
    )
    ends = _ends(tuple(shares.values()))
    return tuple(shares)[sum(int.from_bytes(named.digest(), "little") >= end for end in ends)]


@lru_cache
def _ends(shares: tuple[float, ...]) -> tuple[int, ...]:
    """The hash at which each side but the last ends, computed exactly from the shares' decimal digits."""
    exact = [Fraction(str(share)) for share in shares]
    return tuple(int(_HASHES * end) for end in accumulate(exact[:-1]))


def sides_of(keys: np.ndarray, seed: int, unit: str, shares: Mapping[str, float]) -> dict[str, np.ndarray]:
    """The rows of each side, in ascending order; a side may be empty. Arguments as of ``side_of`` and ``split``."""
    units, owners = np.unique(keys, return_inverse=True)
    names = tuple(shares)
    sides = np.array([names.index(side_of(key, seed, unit, shares)) for key in units.tolist()], dtype=np.int64)[owners]
    return {name: np.flatnonzero(sides == number) for number, name in enumerate(names)}


def split(keys: np.ndarray, seed: int, unit: str) -> dict[str, np.ndarray]:
    """The rows of each side, in ascending order.

    A unit is attack with chance 20 %, train with 72 %, eval with 8 %. Sizes vary as those of independent draws do: of
    101,766 encounters about 73,271 train, give or take 143 (one standard deviation). The number of units on each side
    is public.

    Args:
        keys: (rows,) the own key of the unit that each row belongs to, from the table and not from its order.
        seed: public.
        unit: "record" or the name of a column.

    Raises: ConfigError for an unknown unit, or if a side would have no unit.
    """
    check_unit(unit, "data.unit")
    rows = sides_of(keys, seed, _HASHED_AS.get(unit, "unit"), SHARES)
    empty = [name for name in SIDES if not len(rows[name])]
    if empty:
        problem = f"{len(np.unique(keys))} {unit}s are too few: side {empty[0]} would be empty"
        raise ConfigError("data.unit", problem, fix="use 100 or more, or another data.split_seed")
    return rows


def keys_of(records: Records, unit: str) -> np.ndarray:
    """(records,) the own key of each record's unit.

    A record of a user's own file has no lasting number. Its key is a hash of its content, so equal ones share a side.
    """
    return records.unit if unit != RECORD or records.about["source"] in FORMATS else records.record


def split_off(keys: np.ndarray, seed: int, unit: str, attack: float) -> dict[str, np.ndarray]:
    """The rows of the sides attack and train, where the eval side is another file. Arguments as of ``split``.

    Args:
        attack: share of the units on the attack side, which only attacks read; 0 leaves none.

    Raises: ConfigError for an unknown unit, or if a side that should have units would have none.
    """
    check_unit(unit, "data.unit")
    rows = sides_of(keys, seed, _HASHED_AS.get(unit, "unit"), {"attack": attack, "train": 1 - attack})
    if not len(rows["train"]) or (attack and not len(rows["attack"])):
        problem = f"{attack} of {len(np.unique(keys))} {unit}s would leave a side empty"
        raise ConfigError("data.parts.attack", problem, fix="use another share, or 0")
    return rows


def write_splits(
    narratives: Path, directory: Path, seed: int, unit: str, held_out: Path | None = None, attack: float = 0.0
) -> None:
    """Write attack.parquet, train.parquet and eval.parquet into ``directory``, with the columns and the
    metadata of ``narratives`` plus unit and split.

    Args:
        held_out: file of the eval side, as a benchmark publishes it; all of ``narratives`` then trains but for the
            share ``attack`` of its units. None deals the eval side too.

    Raises: DataError for unreadable narratives; ConfigError as :func:`split`.
    """
    whole = read_records(narratives)
    keys = keys_of(whole, unit)
    fixed = {} if held_out is None else {"fixed": True}
    sides = split(keys, seed, unit) if held_out is None else split_off(keys, seed, unit, attack)
    if held_out is not None:
        other = read_records(held_out)
        write_records(directory / "eval.parquet", replace(other, about={**other.about, "unit": unit, "split": "eval"}))
    for name, rows in sides.items():
        about = {**whole.about, "unit": unit, "split": name, **fixed}
        text = whole.text.take(pa.array(rows))
        write_records(directory / f"{name}.parquet", Records(whole.record[rows], whole.unit[rows], text, about))
