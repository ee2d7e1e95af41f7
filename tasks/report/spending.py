"""Adds up what all runs on the same records have spent, those included that a report does not list.

A run leaves its ledger behind when it is set aside, and when a change of settings, data or code gives its cell another
folder. Its releases cannot be taken back, so a sum over the listed cells alone would be too small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dptune.privacy.set_aside import Spending, spending_of


@dataclass(frozen=True)
class Total:
    """Epsilon and delta of everything that was released about one kind of unit, by basic composition.

    Attributes:
        runs: number of runs that are added up.
        others: number of those runs that the report does not list.
    """

    unit: str
    runs: int
    others: int
    epsilon: float
    delta: float


def unlisted_spendings(runs: Path, names: Collection[str]) -> list[Spending]:
    """The spending of each run in ``runs`` that is not in ``names``; unfinished runs are included."""
    folders = sorted(path for path in runs.iterdir() if path.is_dir() and path.name not in names)
    return [spent for folder in folders if (spent := spending_of(folder))]


def totals(results: Sequence[dict[str, Any]], others: Sequence[Spending] = ()) -> list[Total]:
    """A total for every unit of privacy of ``results``.

    A run of ``others`` counts if its ledger names the same records and unit, or does not say which ones.
    """
    sources = {result["data"] for result in results} | {""}
    same = [one for one in others if one.data in sources]
    return [_total(unit, results, same) for unit in sorted({result["unit"] for result in results})]


def _total(unit: str, results: Sequence[dict[str, Any]], others: Sequence[Spending]) -> Total:
    mine = [result for result in results if result["unit"] == unit]
    more = [one for one in others if one.unit in (unit, "")]
    return Total(
        unit=unit,
        runs=len(mine) + len(more),
        others=len(more),
        epsilon=math.fsum([*(float(result["epsilon_certified"]) for result in mine), *(one.epsilon for one in more)]),
        delta=math.fsum([*(result["delta"] for result in mine), *(one.delta for one in more)]),
    )
