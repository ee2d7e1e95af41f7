"""Totals of a register: what its entries cost, one by one and together, and clauses that say so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader

#: Unit of an ensemble whose guarantee is about all records of a shard at once.
SHARD = "shard"
#: End of the unit of a total that ensembles by shards count in, beside others.
IN_A_SHARD = ", and lies in one shard"


@dataclass(frozen=True)
class Spent:
    """One entry of the register.

    Attributes:
        records: keyed digest of the records.
        id: id of the search, or of the run.
        what: "search", "run", "cell" or "answers".
        epsilon: certified epsilon at ``delta``, computed from the entry; infinite where nothing bounds it.
        study: name of the study that the cell is of; empty for others.
        folder: name of the folder that a run began in; empty where the entry does not say.
        units: number of training units.
        named: whether a line of the register names it; else only its ledger, or certificate, does.
    """

    records: str
    id: str
    what: str
    unit: str
    data: str
    epsilon: float
    delta: float
    study: str = ""
    folder: str = ""
    units: int = 0
    named: bool = True


@dataclass(frozen=True)
class SpentPart:
    """Entries of one kind in a total: all searches, all runs, or the cells of one study.

    Attributes:
        bounded: what those with a finite epsilon cost together.
        unbounded: number of those that nothing bounds.
    """

    what: str
    study: str
    entries: int
    bounded: float
    unbounded: int

    def __str__(self) -> str:
        """The part as a clause."""
        return _clause(self.entries, self.bounded, self.unbounded)


@dataclass(frozen=True)
class SpentTotal:
    """What the entries about the same records and unit cost together, by basic composition: epsilons and deltas add.

    Attributes:
        folders: names of the folders that runs began in, as far as entries say.
        units: numbers of training units of the entries, each once.
    """

    records: str
    data: str
    unit: str
    entries: int
    epsilon: float
    delta: float
    parts: tuple[SpentPart, ...] = ()
    folders: tuple[str, ...] = ()
    units: tuple[int, ...] = ()


def totals_of(found: Iterable[Spent]) -> list[SpentTotal]:
    """The total of each set of records, by unit."""
    groups: dict[tuple[str, str], list[Spent]] = {}
    for one in found:
        groups.setdefault((one.records, one.unit), []).append(one)
    return [_total(unit, own) for (_, unit), own in groups.items()]


def totals_of_all_units(found: Iterable[Spent]) -> list[SpentTotal]:
    """The total of each set of records that paid for more than one unit, all units together."""
    groups: dict[str, list[Spent]] = {}
    for one in found:
        groups.setdefault(one.records, []).append(one)
    units = {records: list(dict.fromkeys(one.unit for one in own)) for records, own in groups.items()}
    return [_total(_alike(units[records]), own) for records, own in groups.items() if len(units[records]) > 1]


def dearest(found: Iterable[Spent]) -> list[Spent]:
    """The entries; of copies of one ledger that no line names, the one that cost most, for each set of records."""
    kept: dict[tuple[str, str], Spent] = {}
    copies: dict[str, list[Spent]] = {}
    for one in found:
        if one.named:
            kept[one.records, one.id] = max(kept.get((one.records, one.id), one), one, key=attrgetter("epsilon"))
        else:
            copies.setdefault(one.id, []).append(one)
    for own in copies.values():
        records = dict.fromkeys(one.records for one in own if one.records)
        most = max(own, key=attrgetter("epsilon"))
        kept |= {(name, f"{most.id} unnamed"): replace(most, records=name) for name in records or [""]}
    return list(kept.values())


def said(found: list[Spent]) -> str:
    """Earlier entries as a clause."""
    total, delta = sum(one.epsilon for one in found), sum(one.delta for one in found)
    times = "once, " if len(found) == 1 else f"{len(found)} times, together "
    bounded = [one.epsilon for one in found if math.isfinite(one.epsilon)]
    known = f", {at_most(sum(bounded), 4)} without the {len(found) - len(bounded)} that nothing bounds"
    price = f"{times}epsilon {at_most(total, 4)} at delta {at_most(delta)}"
    unnamed = sum(not one.named for one in found)
    beside = f", {unnamed} of them by ledgers that the register does not name" if unnamed else ""
    return price + (known if 0 < len(bounded) < len(found) else "") + beside


def _clause(entries: int, bounded: float, unbounded: int) -> str:
    if unbounded == entries:
        return f"{entries}, without bound"
    return f"{entries}, epsilon {at_most(bounded, 4)}" + (f" and {unbounded} without bound" if unbounded else "")


def _parts(found: list[Spent]) -> tuple[SpentPart, ...]:
    """Searches, runs and studies, each in the order of its first entry."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one in found:
        groups.setdefault((one.what, one.study), []).append(one.epsilon)
    return tuple(
        SpentPart(what, study, len(own), math.fsum(filter(math.isfinite, own)), sum(map(math.isinf, own)))
        for (what, study), own in groups.items()
    )


def _alike(units: list[str]) -> str:
    """What all guarantees about these units, which are two or more, are about together."""
    others = [unit for unit in units if unit != SHARD]
    alike = " alike" if len(others) > 1 else ""
    return f"what is one {' and one '.join(others)}{alike}{'' if others == units else IN_A_SHARD}"


def _total(unit: str, found: list[Spent]) -> SpentTotal:
    return SpentTotal(
        found[0].records,
        ", ".join(dict.fromkeys(one.data for one in found)),
        unit,
        len(found),
        sum(one.epsilon for one in found),
        sum(one.delta for one in found),
        _parts(found),
        tuple(dict.fromkeys(one.folder for one in found if one.folder)),
        tuple(dict.fromkeys(one.units for one in found if one.units)),
    )


# Prices of entries of the register of spent budgets.


def _priced(entry: Mapping[str, Any], *, stated: bool = False) -> Spent:
    """An entry, priced from what it holds.

    Args:
        stated: whether to take a cell's own figure in place of a computation.
    """
    content, what = entry["content"], str(entry["kind"])
    about = content if what == "search" else content["header"]
    named = str(about["unit"]), str(about["data"])
    epsilon = _epsilon_of(content, what, stated=stated)
    return Spent(
        entry["records"],
        entry["id"],
        what,
        *named,
        epsilon,
        float(about["delta"]),
        study=str(content.get("study", "")),
        folder=str(content.get("folder", "")),
        units=int(about.get("units", 0)),
    )


def _epsilon_of(content: Mapping[str, Any], what: str, *, stated: bool = False) -> float:
    """The certified epsilon; infinite for what another version wrote and this one cannot price."""
    try:
        return float(content["certified"]) if stated and what == "cell" else _price_of(content, what)
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError):  # the line is whole: its chain was checked
        return math.inf


def _price_of(content: Mapping[str, Any], what: str) -> float:
    if what == "search":
        return SearchCertificate.from_dict(content).certified
    header = RunHeader.from_dict(content["header"])
    planned: Composition = Counter({Release.from_dict(release): int(count) for release, count in content["releases"]})
    certified = header.price(planned).certified if planned else math.inf
    if what == "run" and header.renyi_filter is not None and header.epsilon is not None:
        # It may move its noise, within the budget. Of a cell the releases are those that it made.
        certified = max(certified, header.epsilon)
    return certified
