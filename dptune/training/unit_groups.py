"""Groups of units: each is dealt by a hash of its own key, so that one who joins, leaves or is swapped moves nobody."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.privacy.release import Dealing


def hash_keys(keys: NDArray[np.integer[Any]], salt: int = 0) -> NDArray[np.uint64]:
    """A public 64-bit hash of each key by itself; keys in a row spread evenly. Equal for equal keys of any width.

    It deals units into clients, tenants, the groups of correlated noise and a policy's updates. Clients and tenants are
    units themselves, the same in every run, so they take no salt; a run's groups and updates take the run's own.

    Args:
        salt: 64 public bits; other salts deal the same keys in another way.
    """
    # The key is 2^64 over the golden ratio; the rest is the finaliser of SplitMix64.
    mixed = (keys.astype(np.uint64) ^ np.uint64(salt)) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def turns_of(keys: NDArray[np.integer[Any]], run_id: str, turns: int) -> NDArray[np.int64]:
    """(units,) the turn of each unit, from 0 to ``turns`` - 1: a hash of its own key and of the run's id. Public."""
    salt = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8], "big")
    return (hash_keys(keys, salt) % np.uint64(turns)).astype(np.int64)


@dataclass(frozen=True)
class Turn:
    """The group of units whose turn a row is. Public.

    A unit's group is a hash of the unit's own key and of the run's id, which the ledger's first line holds. So nothing
    is stored, a resumed run and its other ranks deal alike, and a unit that joins, leaves or is swapped for another
    moves nobody else. Records with equal keys share a group, and each still has coins of its own.

    The salt is public, and may be: the price holds for a unit whose group everybody knows, whatever groups the others
    are in (``privacy.accounting.strategy`` has the proof). Somebody who chooses keys so that all units fall into one
    group makes that group's batches larger and the others' empty. Noise, rate and divisor are constants, so it moves no
    epsilon.

    Attributes:
        group: the group, from 0.
        bands: number of groups.
        run_id: the run's id, by which two runs deal differently.
        dealt_by: "key"; or "rank" in runs of earlier versions, which hashed a unit's number among all units.
    """

    group: int
    bands: int
    run_id: str
    dealt_by: Dealing = "key"

    @classmethod
    def of(cls, run_id: str, bands: int, row: int, dealt_by: Dealing = "key") -> Turn | None:
        """The turn of row ``row`` of a run; None with one band, where every row is every unit's."""
        if bands == 1:
            return None
        return cls(row % bands, bands, run_id, dealt_by)

    def holds(self, keys: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """(units,) whether each unit, by its own key, is of the group."""
        return np.asarray(turns_of(keys, self.run_id, self.bands) == self.group)
