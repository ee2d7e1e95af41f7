"""Prices of entries of the register of spent budgets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dptune.core.errors import ConfigError
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.release import Composition, Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.spent_budgets.totals import (
    Spent,
)


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
