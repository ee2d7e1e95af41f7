"""Prices of searches, worked out once in a process for equal arguments: most searches of tests have the same ones.

Importing this replaces ``selection_epsilon`` where searches calibrate and verify their noise; values are the same.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from dptune.job.search import kinds
from dptune.mechanisms import planning
from dptune.privacy import certificate
from dptune.privacy.accounting.loss_profile import Profile
from dptune.privacy.selection import selection_epsilon

_PRICES: dict[tuple[object, ...], float] = {}


def price(profile: Profile, *rest: Any) -> float:
    """``selection_epsilon(profile, law, delta, bound)``."""
    key = (sha256(profile.remove.tobytes() + profile.add.tobytes()).digest(), *rest)
    if key not in _PRICES:
        _PRICES[key] = selection_epsilon(profile, *rest)
    return _PRICES[key]


for _module in (kinds, planning, certificate):
    _module.selection_epsilon = price  # type: ignore[attr-defined]
