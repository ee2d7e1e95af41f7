"""Noise of the benchmarks' schedules at certified epsilon (spec benchmarks.md 1.7), with the papers' units or wider."""

from __future__ import annotations

import pytest

from dptune.mechanisms.planning import Schedule, calibrated, planned
from dptune.mechanisms.registry import build

#: Units, expected batch, steps, delta, epsilon, noise multiplier.
ROWS = {
    "E2E": (42061, 1024, 410, 8e-6, 8, 0.6825),
    "E2E, as PLRV-O counts": (42061, 1024, 124, 1.18875e-5, 1, 1.3495),
    "DART": (93187, 1024, 1365, 1e-5, 3, 0.8954),
    "SST-2": (67349, 1000, 201, 7.424e-6, 1, 1.1648),
    "QNLI": (104743, 2000, 312, 4.774e-6, 3, 0.8862),
    "SST-2, small, phrases": (67349, 256, 200, 1 / (2 * 67349), 1, 0.7618),
    "SST-2, small, sentences": (6920, 256, 80, 1 / (2 * 6920), 1, 1.4185),
}


@pytest.mark.parametrize("name", ROWS)
def test_noise_of_a_benchmarks_schedule(name: str) -> None:
    units, batch, steps, delta, epsilon, noise = ROWS[name]
    found = calibrated(
        lambda multiplier: build("static", {"noise_multiplier": multiplier}),
        epsilon,
        Schedule(batch / units, steps, delta),
        "certified",
    )
    (release,) = planned(found.mechanism, Schedule(batch / units, steps, delta))
    assert release.noise_multiplier == pytest.approx(noise, rel=1e-3)
