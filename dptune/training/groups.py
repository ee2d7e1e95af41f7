"""Groups of units for correlated noise: a unit can be drawn in every b-th row alone, by a public deal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def hash_keys(keys: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A public 64-bit hash of each key by itself; keys in a row spread evenly. Equal for equal keys of any width."""
    # The key is 2^64 over the golden ratio; the rest is the finaliser of SplitMix64.
    mixed = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Turn:
    """The group of units whose turn a row is. Public.

    A unit's group follows from its own number and from the run's id, which its ledger holds: nobody else's moves if a
    unit is emptied or filled, and after a resume, or on another rank, the groups are the same. That groups are known
    costs nothing: the price holds for a unit whose group is known.

    Attributes:
        group: the group, from 0.
        bands: number of groups.
        salt: 64 bits of the run's id, by which two runs deal differently.
    """

    group: int
    bands: int
    salt: int

    @classmethod
    def of(cls, run_id: str, bands: int, row: int) -> Turn | None:
        """The turn of row ``row`` of a run; None with one band, where every row is every unit's."""
        if bands == 1:
            return None
        salt = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8], "big")
        return cls(row % bands, bands, salt)

    def holds(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(units,) whether each unit, by its number among all units of the run, is of the group."""
        mixed = hash_keys(numbers.astype(np.uint64) ^ np.uint64(self.salt))
        return np.asarray(mixed % np.uint64(self.bands) == self.group)
