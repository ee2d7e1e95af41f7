"""Runs in the folder of another run: those that check a rehearsal's ranking lie in that of its winner.

They go where that folder goes, and cost what they cost beside it.
"""

from __future__ import annotations

import math
from pathlib import Path

from dptune.digits import at_most
from dptune.privacy.set_aside import Spending, spending_of

#: In the folder of a rehearsal's winner: the runs that check the ranking, each in a folder of its own.
FOLDER = "ranking"


def runs_within(folder: Path) -> list[Path]:
    """The folders of the runs in the folder of another one, those that were set aside included."""
    within = folder / FOLDER
    return sorted(path for path in within.iterdir() if path.is_dir()) if within.is_dir() else []


def spending_within(folder: Path) -> list[Spending]:
    """What each run in the folder of another one has spent, where anything was charged to it."""
    return [spent for run in runs_within(folder) if (spent := spending_of(run))]


def said_within(folder: Path) -> str:
    """What those runs have spent, and all in the folder together, as the end of a sentence; empty if they are none."""
    within = spending_within(folder)
    if not within:
        return ""
    own = spending_of(folder)
    total = [*within, *([own] if own else [])]
    runs = f"{len(within)} runs that check its ranking have" if len(within) > 1 else "a run that checks its ranking has"
    unknown = sum(bool(one.problem) for one in total)
    but = f", because it is unknown what {unknown} of them spent" if unknown else ""
    return f"; {runs} spent {_together(within)} beside that, {_together(total)} in all{but}"


def _together(spent: list[Spending]) -> str:
    """Their sum, by basic composition."""
    epsilon, delta = math.fsum(one.epsilon for one in spent), math.fsum(one.delta for one in spent)
    return f"epsilon {at_most(epsilon, 4)}, delta {at_most(delta)}"
