"""Announcement of `make repro`: what the study runs and shows, and how long that takes on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dptune.core.errors import DptuneError
from tasks.paths import REPORT
from tasks.settings.experiment import Experiment
from tasks.settings.params import Settings, load_settings

#: Minutes that the shipped study took on two idle cores, without setup: the least and the most of several runs.
_MEASURED = (10, 12)
_SHIPPED = ("nonprivate", "static", "quantile", "rldp", "rldp_published")
_NEXT = "Afterwards     make repro PROFILE=profiles/price-of-privacy.yaml draws what epsilon 1, 2, 4 and 8 cost"
_TOOK = re.compile(r"^this run took (\d+) seconds$", re.MULTILINE)
_STAGE = re.compile(r"^Running stage '", re.MULTILINE)


def opening(log: Path) -> list[str]:
    """The lines; none where params.yaml cannot be read, which the first stage says.

    Args:
        log: of the run before, if there was one; ``took`` is its last line.
    """
    try:
        settings = load_settings()
    except (DptuneError, OSError):
        return []
    takes = f"It takes       {_how_long(settings, log)}. What is done already is skipped."
    return [*_what(settings), takes, *([_NEXT] if _is_shipped(settings.experiment) else [])]


def took(seconds: float) -> str:
    """The line of a log that says how long its run took."""
    return f"this run took {seconds:.0f} seconds\n"


def _what(settings: Settings) -> list[str]:
    study = settings.experiment
    epsilons = ", ".join(f"{one:g}" for one in study.epsilons)
    seeds = f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}"
    return [
        f"Study {study.name!r}: {', '.join(study.mechanisms)}",
        f"               at {study.accounting} epsilon {epsilons}, {seeds}, on {', '.join(study.models)}",
        f"You get        {REPORT / 'report.html'}: the best model at the privacy that is paid, proofs and attacks",
    ]


def _how_long(settings: Settings, log: Path) -> str:
    before = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if said := _TOOK.search(before):
        stages = len(_STAGE.findall(before))
        return f"what changed; the last run here took {_minutes(int(said[1]))} for {stages} stage{'s' * (stages != 1)}"
    if _is_shipped(settings.experiment):
        return f"{_MEASURED[0]} to {_MEASURED[1]} minutes on two idle cores; here it may use {cores}"
    return f"a time that has not been measured for these settings; here it may use {cores} cores"


def _is_shipped(study: Experiment) -> bool:
    return (tuple(study.mechanisms), tuple(study.epsilons), tuple(study.seeds)) == (_SHIPPED, (2.0,), (0,))


def _minutes(seconds: int) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds} seconds"
