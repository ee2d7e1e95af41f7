"""Verdicts: what is certified of a step is never refuted by chance beyond the stated rate, and what is false is."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import binom

from dptune.audit.games.scene import StepAudit
from dptune.audit.verdict import CHECKS, Certificate, Verdict, certificate, judged, noise_detectable
from dptune.privacy.accountants import epsilons
from dptune.privacy.accounting.laplace_mixtures import InverseScale
from dptune.privacy.release import Release

DELTA = 1e-5
TRIALS = 1000
RATE = 0.05  # of false alarms


def found(missed: int, alarms: int, trials: int = TRIALS, confidence: float = 0.95, rate: float = 1.0) -> StepAudit:
    """An audit that counted these errors."""
    errors = (missed, trials, alarms, trials)
    return StepAudit("made", trials, confidence, 1, rate, DELTA, Release(rate, 1.0), errors, errors)


def by_chance(certified: Certificate, fnr: float, fpr: float, audits: int, seed: int, trials: int = TRIALS) -> float:
    """Share of audits that accuse where an attack has these error rates."""
    generator = np.random.default_rng(seed)
    counts = zip(generator.binomial(trials, fnr, audits), generator.binomial(trials, fpr, audits), strict=True)
    return float(
        np.mean([judged(found(int(a), int(b), trials), certified, RATE).accusation is not None for a, b in counts])
    )


@pytest.mark.parametrize("cut", [-1.0, 0.5, 1.3])
def test_the_best_attack_on_a_gaussian_step_accuses_no_more_than_is_stated(cut: float) -> None:
    """300 audits at a false-alarm rate of 0.05: more accusations than this bound come with chance 1e-6 at most."""
    certified = certificate(Counter([Release(1.0, 1.0)]), DELTA)
    share = by_chance(certified, float(ndtr(cut - 1)), float(ndtr(-cut)), 300, seed=1)
    assert 300 * share <= binom.isf(1e-6, 300, RATE)


@pytest.mark.parametrize("cut", [0.5, 1.5, 2.5])
def test_the_best_attack_on_a_sampled_step_accuses_no_more_than_is_stated(cut: float) -> None:
    """Sampled at 0.3: no single mu is certified, but a curve; the attack lies on the true one, which is above it."""
    certified = certificate(Counter([Release(0.3, 0.5)]), DELTA)
    assert certified.mu is None
    fpr = float(ndtr(-cut))
    fnr = 1 - (0.7 * fpr + 0.3 * float(ndtr(2 - cut)))
    assert certified.least_false_negatives(fpr) <= fnr
    assert 100 * by_chance(certified, fnr, fpr, 100, seed=2) <= binom.isf(1e-6, 100, RATE)


def test_a_sampled_step_with_a_third_of_its_noise_is_accused() -> None:
    """19 of 20 seeded audits at least, of 4,000 trials each."""
    certified = certificate(Counter([Release(0.3, 0.5)]), DELTA)
    fpr = float(ndtr(-4.0))
    fnr = 1 - (0.7 * fpr + 0.3 * float(ndtr(6 - 4.0)))
    assert by_chance(certified, fnr, fpr, 20, seed=3, trials=4000) >= 19 / 20


@given(st.floats(0.3, 3), st.integers(1, 6))
def test_certain_gaussian_steps_have_the_mu_of_their_ratio(noise: float, steps: int) -> None:
    certified = certificate(Counter({Release(1.0, noise, sensitivity=1.5): steps}), DELTA)
    assert certified.mu == pytest.approx(math.sqrt(steps) * 1.5 / noise)
    assert certified.mu_at(0.1) == certified.mu


def test_disjoint_users_do_not_add_up() -> None:
    parts = Counter([Release(1.0, 1.0, part=0), Release(1.0, 0.5, part=1)])
    assert certificate(parts, DELTA).mu == 2.0


@pytest.mark.parametrize(
    "release", [Release(1.0, 0.0, noise="none"), Release(1.0, 1.0, raw_inputs=("norms",))], ids=["no noise", "leak"]
)
def test_where_nothing_is_certified_nothing_is_accused(release: Release) -> None:
    certified = certificate(Counter([release]), DELTA)
    verdict = judged(found(0, 0), certified, RATE)
    assert math.isinf(certified.epsilon)
    assert verdict.mu_certified == math.inf
    assert verdict.accusation is None
    assert "nothing finite is certified" in verdict.power


@given(st.floats(0.001, 0.999))
def test_a_certified_curve_is_never_above_the_true_one(rate: float) -> None:
    """Sampled at 0.3 with noise 0.5, in both directions of adding or removing: exact curves by Neyman and Pearson."""
    certified = certificate(Counter([Release(0.3, 0.5)]), DELTA)
    cuts = np.linspace(-8, 10, 4001)
    out, inside = ndtr(-cuts), 0.7 * ndtr(-cuts) + 0.3 * ndtr(2 - cuts)
    added = np.interp(rate, out[::-1], (1 - inside)[::-1])
    removed = np.interp(rate, 1 - inside, out)
    assert certified.least_false_negatives(rate) <= min(added, removed) + 1e-6


def test_checks_share_the_false_alarms() -> None:
    certified = certificate(Counter([Release(1.0, 1.0)]), DELTA)
    alone, one_of_four = judged(found(10, 10), certified, 0.01), judged(found(10, 10), certified, 0.01, 4 * CHECKS)
    assert alone.confidence == pytest.approx(1 - 0.01 / 2)
    assert one_of_four.confidence == pytest.approx(1 - 0.01 / 8)
    assert one_of_four.mu_alarm < alone.mu_alarm


def test_epsilon_accuses_where_mu_cannot() -> None:
    """A step that announces with chance 0.06 that the sample is in: few misses less, but a proof."""
    certified = certificate(Counter([Release(1.0, 1.0)]), DELTA)
    errors = ((0, 1, 0, 1), (94_000, 100_000, 0, 100_000))
    verdict = judged(StepAudit("made", 1, 0.95, 1, 1.0, DELTA, Release(1.0, 1.0), *errors), certified, 0.001)
    assert verdict.mu_alarm == 0
    assert "shows epsilon >= " in (verdict.accusation or "")


def test_a_verdict_rounds_no_figure_in_its_own_favour() -> None:
    """Rounded to the nearest, the first would say "shows mu >= 2, but 2 is certified"."""
    verdict = Verdict(0.001, 0.999, 2.00009, 0.5, 2.00004, 9.0, 3.0055, 9.5055, 2.3451, 0.78999)
    assert "shows mu >= 2.00009 at confidence 0.999, but 2.00004 is certified" in (verdict.accusation or "")
    assert "mu >= 2.345 at confidence 0.999, but 2.001 is" in (replace(verdict, mu_alarm=2.3459).accusation or "")
    assert "at confidence 0.999999, but" in (replace(verdict, confidence=0.9999995).accusation or "")
    assert verdict.power == (
        "a mu of 2.35 or more is refuted in 19 of 20 audits at best: noise below 0.789 times what is charged; "
        "a certified epsilon below 9.5 can be refuted"
    )
    blind = replace(verdict, mu_detectable=math.inf, epsilon_refutable=8.0055)
    assert blind.power == (
        "NO POWER on mu: these trials show at most 3.01, with no error in any of them; "
        "NO POWER on epsilon: these trials refute at most 8.01"
    )


def test_what_is_refutable_is_what_no_error_shows() -> None:
    certified = certificate(Counter([Release(1.0, 0.5)]), DELTA)
    best = judged(found(0, 0), certified, 0.001)
    assert (best.mu_alarm, best.epsilon_alarm) == (best.mu_refutable, best.epsilon_refutable)
    assert best.epsilon_refutable < best.epsilon_certified == epsilons(Counter([Release(1.0, 0.5)]), DELTA).certified
    assert "NO POWER on epsilon" in best.power
    assert "NO POWER on mu" not in best.power


def test_too_few_trials_to_see_anything_have_no_power() -> None:
    assert noise_detectable(6.0, 400, 400, 0.9995) == 0.0
    verdict = judged(found(0, 0, 400), certificate(Counter([Release(1.0, 1 / 6)]), DELTA), 0.001)
    assert verdict.accusation is None
    assert "NO POWER on mu" in verdict.power


@pytest.mark.parametrize("mu", [0.716, 1.33])
@pytest.mark.parametrize("trials", [400, 4000])
def test_what_is_called_detectable_is_refuted_in_19_of_20_audits(mu: float, trials: int) -> None:
    """2,000 audits of a Gaussian step at that noise; below 0.93 with chance 1e-4 at most where 0.95 is true.

    The attack is the symmetric one, which need not be the best: its noise is taken a tenth lower.
    """
    confidence = 1 - 0.001 / 20
    noise = noise_detectable(mu, trials, trials, confidence)
    miss = float(ndtr(-mu / (0.9 * noise) / 2))
    counts = np.random.default_rng(4).binomial(trials, miss, (2000, 2))
    certified = Certificate(math.inf, mu)
    refuted = [judged(found(int(a), int(b), trials), certified, 0.001, 20).accusation is not None for a, b in counts]
    assert np.mean(refuted) >= 0.93


def test_more_trials_see_more() -> None:
    seen = [noise_detectable(0.716, trials, trials, 0.99995) for trials in (400, 800, 1600, 4000)]
    assert seen == sorted(seen)
    assert seen[0] < 0.5 < seen[1]


def test_a_bound_on_mu_that_no_attack_can_reach_promises_nothing_about_noise() -> None:
    """The mu of a Laplace mixture is that of a Gaussian that is at most as private: less noise need not show it."""
    law = InverseScale(constant=1.0)
    laplace = certificate(Counter([Release(1.0, 1.0, noise="laplace_mixture", norm="l1", law=law)]), 1e-5)
    assert laplace.mu == pytest.approx(math.sqrt(math.pi / 2))
    assert not laplace.is_gaussian
    assert certificate(Counter([Release(1.0, 1.0)]), 1e-5).is_gaussian


def test_a_certificate_of_hardly_any_noise_bounds_nothing_and_does_not_overflow() -> None:
    found = certificate(Counter([Release(0.5, 0.02)]), 1e-5)
    assert 0 <= found.least_false_negatives(0.1) <= 1
