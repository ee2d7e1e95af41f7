"""Privacy units: the assignment of records to units, groups of units, and the batches drawn from them.

Each unit is dealt to a group by a hash of its own key, so that one who joins, leaves or is swapped moves nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.core.settings import RECORD, check_unit
from dptune.privacy.entropy import Entropy, poisson_sample, uniform
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


#: Key of an auditor's first slot. Units have none down there: theirs are of 63 bits, and planted records' just below 0.
_SLOTS = -(2**63)


class _Singles(Sequence[NDArray[np.int64]]):
    """Units of one record each: only the absent ones need to be stored."""

    def __init__(self, count: int, absent: NDArray[np.bool_] | None) -> None:
        self._units = range(count)
        self._absent = np.flatnonzero(absent) if absent is not None else np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, unit: Any) -> Any:
        record = self._units[unit]
        place = np.searchsorted(self._absent, record)
        gone = place < len(self._absent) and self._absent[place] == record
        return np.array([] if gone else [record], dtype=np.int64)

    @property
    def last_record(self) -> int:
        """Highest index of a record that some unit names, -1 without any. Private."""
        return len(self) - 1


class _Grouped(Sequence[NDArray[np.int64]]):
    """Records in the order of their units, and where each unit starts: two flat arrays, however many units.

    Attributes:
        keys: (units,) the own key of each unit: what its records were grouped by.
    """

    def __init__(self, units: NDArray[np.integer[Any]], count: int | None, absent: NDArray[np.bool_] | None) -> None:
        """Sort records by ``units``, (records,) unit of each: a number below ``count``, or any without ``count``."""
        small = np.int32 if len(units) < 2**31 else np.int64
        order = np.argsort(units, kind="stable").astype(small)
        ordered = units[order]
        if count is None:
            first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)])
            starts, self.keys = np.concatenate([first, [len(ordered)]]), ordered[first]
        else:
            self.keys = np.arange(count)
            starts = np.searchsorted(ordered, np.arange(count + 1))
        if absent is not None and absent.any():
            present = ~absent[order]
            starts = np.concatenate([[0], np.cumsum(present)])[starts]
            order = order[present]
        self._order, self._starts = order, starts.astype(small)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, unit: Any) -> Any:
        number = range(len(self))[unit]
        return self._order[self._starts[number] : self._starts[number + 1]].astype(np.int64)

    @property
    def most(self) -> int:
        """Number of records of the largest unit."""
        return int(np.diff(self._starts).max())

    @property
    def last_record(self) -> int:
        """Highest index of a record that some unit names, -1 without any. Private."""
        return int(self._order.max(initial=-1))


@dataclass(frozen=True)
class _Span(Sequence[NDArray[np.int64]]):
    """A range of other units."""

    whole: Sequence[NDArray[np.int64]]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, unit: Any) -> Any:
        return self.whole[self.numbers[unit]]


@dataclass(frozen=True)
class PrivacyUnits:
    """The assignment of records to units of privacy.

    Attributes:
        kind: "record" (each record its own unit), the name of the column whose values name the units, or "client"
            (many units).
        members: indices of each unit's records. Computed when asked for, so that memory does not grow with the units.
        most: m, the most records one unit puts into a batch.
        planted: (slots,) whether the auditor's coin put a gradient into each slot. Slots are numbered after the units.
        keys: (units,) the own key of each unit of the whole run, which says what group it is in; None for units that
            nothing deals into groups.

    Example:
        >>> import numpy as np
        >>> from dptune.privacy.entropy import OsEntropy
        >>> from dptune.training.privacy_units import PrivacyUnits
        >>> units = PrivacyUnits.of("customer_id", np.array([7, 7, 7, 9]), most=2)
        >>> len(units)
        2
        >>> [len(records) for records in units.draw(sample_rate=1.0, entropy=OsEntropy())]
        [2, 1]
    """

    kind: str
    members: Sequence[NDArray[np.int64]] = field(repr=False)
    most: int
    planted: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    keys: NDArray[np.integer[Any]] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, kind: str, keys: NDArray[np.integer[Any]], most: int, absent: NDArray[np.bool_] | None = None
    ) -> PrivacyUnits:
        """Group records into units.

        Args:
            kind: "record", or the name of the column that ``keys`` come from.
            keys: (records,) the own key of each record's unit: a number that follows from the column's value, or from
                the record's content or id, never from its place. Records that are units of their own may have equal
                keys: they stay units of their own.
            most: m, for units of many records.
            absent: (records,) units that are not in the data, as an auditor's coin left them out. They count, so
                that the number of units tells nothing, and bring no record.

        Raises: ConfigError for a kind that no column can have, or ``most`` below 1.
        """
        check_unit(kind, "data.unit")
        if most < 1:
            raise ConfigError("records_per_unit", f"{most} is below 1", fix="use 1 or more")
        if kind == RECORD:
            return replace(cls.records(len(keys), absent), keys=keys)
        members = _Grouped(keys, None, absent)
        return cls(kind, members, most, keys=members.keys)

    @classmethod
    def records(cls, count: int, absent: NDArray[np.bool_] | None = None) -> PrivacyUnits:
        """Each of ``count`` records its own unit, without keys; ``absent`` as in ``of``."""
        return cls(RECORD, _Singles(count, absent), 1)

    @classmethod
    def clients(
        cls, count: int, keys: NDArray[np.integer[Any]], absent: NDArray[np.bool_] | None = None
    ) -> PrivacyUnits:
        """Deal whole units out to simulated clients by a public hash of their keys.

        Where a unit goes depends on its own key alone, so that a unit or a client can join or leave without anybody
        else's records moving. A client may be empty.

        Args:
            keys: (records,) the own key of each record's unit. Numbers by order of appearance are none: a unit that
                leaves would change those of all who come later.
        """
        client = hash_keys(keys) % np.uint64(count)
        members = _Grouped(client.astype(np.int64), count, absent)
        return cls("client", members, members.most, keys=members.keys)

    def with_slots(self, planted: NDArray[np.bool_]) -> PrivacyUnits:
        """The units plus one auditor's slot for each entry: one more unit, which is empty if the entry is False.

        Raises: ConfigError for clients, whose updates no planted gradient resembles.
        """
        if self.kind == "client" and len(planted):
            raise ConfigError("canaries.crafted", "cannot stand in for updates of clients", fix="use 0")
        return replace(self, planted=np.asarray(planted, dtype=bool))

    def __len__(self) -> int:
        return len(self.members) + len(self.planted)

    @property
    def last_record(self) -> int:
        """Highest index of a record that some unit may name, -1 without any. Private.

        Units that this module made answer at once; members of another kind are read one by one.

        Raises: ConfigError for a negative index, which a batch would take for an auditor's slot.
        """
        if isinstance(self.members, _Singles | _Grouped):
            return self.members.last_record
        if any(min(records) < 0 for records in self.members if len(records)):
            raise ConfigError("units", "hold a negative index", fix="give indices of records, which begin at 0")
        return max((int(max(records)) for records in self.members if len(records)), default=-1)

    def part(self, rank: int, world: int) -> PrivacyUnits:
        """The units that one of ``world`` processes draws: a range of them, by public numbers alone.

        An auditor's slots are all rank 0's, which alone knows the coins.
        """
        start, end = (len(self.members) * bound // world for bound in (rank, rank + 1))
        own = replace(self, members=_Span(self.members, range(start, end)))
        return own if rank == 0 else replace(own, planted=self.planted[:0])

    def draw(self, sample_rate: float, entropy: Entropy, turn: Turn | None = None) -> list[NDArray[np.int64]]:
        """A Poisson batch of units: for each drawn unit, the records (at most ``most``) it brings. May be empty.

        A unit without a record is left out of the batch and of its counts. An auditor's slot brings one negative
        number, which ``split_batch`` reads. Takes time in proportion to the batch, however many units there are.

        Args:
            turn: the group that is drawn from; a unit of another group never enters. None draws from all units.

        Raises: ConfigError for a turn of units without keys.
        """
        chosen = poisson_sample(entropy, len(self), sample_rate)
        if turn is not None:
            chosen = chosen[self.of_turn(turn, chosen)]
        return self._bring(chosen, entropy)

    def bring(self, numbers: NDArray[np.int64], entropy: Entropy) -> list[NDArray[np.int64]]:
        """A batch as ``draw`` gives it, of the units with these numbers in the whole run; those of other ranks are
        left out.
        """
        if isinstance(self.members, _Span):
            first, own, everybody = self.members.numbers.start, len(self.members), len(self.members.whole)
            mine = numbers[(numbers >= first) & (numbers < first + own)] - first
            slots = numbers[(numbers >= everybody) & (numbers < everybody + len(self.planted))]
            numbers = np.concatenate([mine, slots - everybody + own])
        return self._bring(numbers, entropy)

    def _bring(self, chosen: NDArray[np.int64], entropy: Entropy) -> list[NDArray[np.int64]]:
        drawn = (self._brought(int(unit)) for unit in chosen)
        return [self._choose(records, entropy) for records in drawn if len(records)]

    def of_turn(self, turn: Turn, units: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(units,) whether each of these units is of the turn's group. Raises: ConfigError for units without keys."""
        numbers = self._numbers(units)
        if turn.dealt_by == "rank":
            return turn.holds(numbers)
        if (keys := self.own_keys(numbers)) is None:
            problem = "have no keys of their own, by which correlated noise deals them into groups"
            raise ConfigError("units", problem, fix="make them with PrivacyUnits.of, and give it the keys")
        return turn.holds(keys)

    def own_keys(self, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """(numbers,) the own key of each unit or slot by its number in the whole run; None for units without keys."""
        if self.keys is None:
            return None
        keys, are_units = np.zeros(len(numbers), dtype=np.int64), numbers < len(self.keys)
        keys[are_units] = self.keys[numbers[are_units]]
        keys[~are_units] = _SLOTS + (numbers[~are_units] - len(self.keys))  # a slot's own place, and no unit's number
        return keys

    def _numbers(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers that units have in the whole run, of which these may be one rank's part; slots come last."""
        if not isinstance(self.members, _Span):
            return units
        first, own, everybody = self.members.numbers.start, len(self.members), len(self.members.whole)
        return np.where(units < own, first + units, everybody + units - own)

    def _brought(self, unit: int) -> NDArray[np.int64]:
        slot = unit - len(self.members)
        if slot < 0:
            return np.asarray(self.members[unit])
        return np.array([-1 - slot] if self.planted[slot] else [], dtype=np.int64)

    def _choose(self, records: NDArray[np.int64], entropy: Entropy) -> NDArray[np.int64]:
        if len(records) <= self.most:
            return records
        return records[np.argsort(uniform(entropy, len(records)))[: self.most]]


def split_batch(batch: list[NDArray[np.int64]]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Split a drawn batch into the units that have records and the numbers of the auditor's slots."""
    records = [unit for unit in batch if unit[0] >= 0]
    return records, np.array([-1 - unit[0] for unit in batch if unit[0] < 0], dtype=np.int64)
