"""The certificate of a search that has ended, for tests of what is printed and told of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dptune.privacy.certificate import ScoreTerms, SearchCertificate, Winner
from dptune.privacy.release import Release
from dptune.privacy.selection_law import SelectionLaw

RELEASE = Release(0.02, 1.2)


def certificate(**changes: Any) -> SearchCertificate:
    found = SearchCertificate(
        id="abc",
        epsilon=2.0,
        delta=1e-5,
        unit="record",
        units=500,
        data="own",
        telemetry="private",
        law=SelectionLaw.of(3, 2),
        bound="hull",
        space=[{"weight": 1.0, "batch": [8, 16]}],
        kinds=((0.5, ((RELEASE, 40),)), (0.5, ((Release(0.04, 1.8), 40),))),
        score=ScoreTerms("held_out", 1.0, 3.0, 100),
        commitment="0" * 64,
        winner=Winner({"batch": 8}, "d" * 64, "c" * 64, 0.25),
    )
    return replace(found, **changes)
