"""The largest of a mechanism's bounds holds with the stated confidence, however many there are."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom

from dptune.audit import one_run as module
from dptune.audit.one_run import one_run
from tasks.audit.target import Target

AUDITS, SEEDS, KINDS, CANARIES = 150, 5, 2, 60
#: A confidence of 0.95 is missed by more of the audits with probability 1e-6 at most.
ALLOWED = int(binom.isf(1e-6, AUDITS, 0.05))


def confidence(seeds: int, bounds: int) -> float:
    target: Any = SimpleNamespace(settings=SimpleNamespace(confidence=0.95), seeds=seeds)
    return Target.confidence(target, bounds)


def largest(epsilon: float, sure: float, generator: np.random.Generator) -> float:
    """The largest bound of five seeds with two kinds of canaries, whose run is randomised response."""
    bounds = []
    for _ in range(SEEDS * KINDS):
        coins = generator.random(CANARIES) < 0.5
        scores = (coins == (generator.random(CANARIES) < expit(epsilon))).astype(float)
        bounds.append(one_run(scores, coins, 1e-5, sure).epsilon_audited)
    return max(bounds)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_the_largest_of_ten_bounds_is_too_high_in_one_audit_of_twenty_at_most(
    epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At epsilon 0 scores know nothing. False alarms: 1e-6. Bounds that do not share their error miss it by far."""
    for name in ("one_run_mu", "gaussian_epsilon"):  # equal counts have equal bounds
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))
    wrong = {}
    for sure in (0.95, confidence(SEEDS, KINDS)):
        generator = np.random.default_rng(1)
        wrong[sure] = sum(largest(epsilon, sure, generator) > epsilon for _ in range(AUDITS))
    assert wrong[confidence(SEEDS, KINDS)] <= ALLOWED < wrong[0.95]


def test_one_bound_of_one_seed_keeps_the_whole_error() -> None:
    assert confidence(seeds=1, bounds=1) == 0.95
    assert confidence(seeds=3, bounds=2) == pytest.approx(1 - 0.05 / 6)
