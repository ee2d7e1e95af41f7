"""The alarm by a run's coins: as rare as it says under everything that keeps the certificate, and able to ring."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import binom

from dptune.audit import refutation as module
from dptune.audit.draws.draw_test import _draws_for
from dptune.audit.epsilon_bounds import coins_refute, epsilon_from_errors, gaussian_epsilon, one_run_epsilon
from dptune.audit.one_run import right_guesses
from dptune.audit.refutation import Refutation, refutation, run_certificate
from dptune.audit.verdict import DELTAS, Certificate
from dptune.core.digits import at_least
from dptune.core.errors import DataError
from dptune.mechanisms.registry import takes_noise
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from tasks.audit.registry import comparisons
from tasks.settings.mechanisms import epsilons_of, options_on
from tasks.settings.params import load_settings

DELTA = 1e-5
#: Confidence of each check of the default study: 0.001 for eight cells of seven checks.
ALARM = 1 - 0.001 / 56
#: The default study: 72 steps at this rate, with the noise that certifies epsilon 1, and that of 2.
RATE, STEPS, OF_ONE, OF_TWO = 64 / 4559, 72, 0.96879, 0.77749
ROOT = Path(__file__).parents[2]


def header(delta: float = DELTA, **changes: object) -> RunHeader:
    given = {"mechanism": "static", "published_accountant": "gdp_clt", "accounting": "certified", "epsilon": 2.0}
    told = {"unit": "record", "units": 4559, "data": "made", "telemetry": "research", "run_id": "0" * 8}
    return RunHeader(**{**given, **told, "delta": delta, **changes})  # type: ignore[arg-type]


@functools.cache
def default(noise: float = OF_TWO) -> Certificate:
    return run_certificate(header(), Counter({Release(RATE, noise): STEPS}))


def coins(right: int, canaries: int = 256) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores that rank all coins, of which a guess of each coin gets so many right; the sure guesses are the wrong."""
    included = np.arange(canaries) % 2 == 0
    scores = included.astype(float)
    wrong = canaries - right
    scores[:wrong] = 1.0 - scores[:wrong]
    return scores, included


def test_the_default_studys_coins_can_refute_and_need_245_of_256() -> None:
    """A bound on epsilon at its delta cannot where half of delta is allowed, however many canaries there are."""
    for canaries in (256, 512, 4096, 100_000):
        assert one_run_epsilon(canaries, canaries, canaries, DELTA, 1 - DELTA / 2) == 0.0
    found = {right: refutation(*coins(right), default(), DELTA, ALARM) for right in (244, 246, 256)}
    assert [one.refuted for one in found.values()] == [False, True, True]
    assert [one.needed for one in found.values()] == [245] * 3
    assert all(one.epsilon_refutable == pytest.approx(3.72, abs=0.01) for one in found.values())
    assert "could have refuted the certified epsilon 2, and any up to 3.72: by 245 of 256" in found[244].power
    assert found[244].accusation is None
    said = str(found[246].accusation)
    assert said.startswith("guesses 246 of 256 coins right, where the certified epsilon 2 allows 245 or more with a")
    assert said.endswith("chance below 1.8e-05")


def test_the_page_has_the_default_studys_figures() -> None:
    """They hang on the number of audited cells, so a study with more of them needs the page and params.yaml anew."""
    settings = load_settings(ROOT / "params.yaml")
    cells = 0
    for name in settings.experiment.mechanisms:
        options = options_on(settings.mechanisms[name], "small")
        own = epsilons_of(options)
        cells += len(settings.experiment.epsilons if own is None else own) if takes_noise(name, options) else 1
    assert pytest.approx(settings.audit.false_alarms / cells / comparisons()) == 1 - ALARM
    needed = [refutation(*coins(256), default(noise), DELTA, ALARM).needed for noise in (OF_ONE, OF_TWO)]
    trials = settings.audit.step_trials * 4 // 5
    step = at_least(epsilon_from_errors(0, trials, 0, trials, DELTA, ALARM))
    page = (ROOT / "docs" / "concepts" / "audits.md").read_text(encoding="utf-8")
    assert "{} right guesses refute a certified epsilon of 1, {} refute 2,".format(*needed) in page
    assert f"none wrong refutes an epsilon of {step}, where" in page
    assert f"counted: {_draws_for(4559, RATE, 1 - ALARM):,} draws in the default" in page


def test_too_few_coins_cannot_refute_and_say_so() -> None:
    few = refutation(*coins(36, 36), default(), DELTA, ALARM)
    assert (few.needed, few.refuted, few.epsilon_refutable) == (None, False, 0.0)
    assert few.power.startswith("NO POWER on epsilon: 36 canaries are too few to refute the certified epsilon 2, even")
    enough = int(re.findall(r"about (\d+) could", few.power)[0])
    for canaries, able in ((enough, True), (round(0.85 * enough), False)):
        found = refutation(*coins(canaries, canaries), default(), DELTA, ALARM)
        assert (found.refuted, found.too_few == "") == (able, able)


def test_what_does_not_accuse_is_told_of_all_coins() -> None:
    """A quarter of the coins comes closer to its own least number, and says less."""
    generator = np.random.default_rng(7)
    included = generator.random(256) < 0.5
    found = refutation(generator.standard_normal(256), included, default(), DELTA, 1 - 0.001 / 12)
    assert (found.guesses, found.refuted) == (256, False)


def test_nothing_finite_is_nothing_to_refute() -> None:
    leaks = Counter({Release(0.1, 1.0, raw_inputs=("raw medians",)): 3})
    found = refutation(*coins(256), run_certificate(header(), leaks), DELTA, ALARM)
    assert not found.refuted
    assert "nothing to refute" in found.power
    assert found.epsilon_refutable == pytest.approx(3.72, abs=0.01), "of a finite one, had there been any"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal counts have equal bounds: thousands of runs need each only once."""
    for name in ("_plans", "_needed", "one_run_mu", "gaussian_epsilon"):
        monkeypatch.setattr(module, name, functools.cache(getattr(module, name)))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_the_alarm_is_as_rare_as_it_says_under_gaussian_noise(mu: float) -> None:
    """3,000 runs of 60 coins, each seen through noise of its own, at an alarm rate of 0.2. False alarms: 1e-6."""
    generator, runs = np.random.default_rng(6), 3000
    certificate = Certificate(gaussian_epsilon(mu, DELTA), None, tuple((gaussian_epsilon(mu, d), d) for d in DELTAS))
    alarms = 0
    for _ in range(runs):
        included = generator.random(60) < 0.5
        scores = mu * included + generator.standard_normal(60)
        alarms += refutation(scores, included, certificate, DELTA, 0.8).refuted
    assert alarms <= binom.isf(1e-6, runs, 0.2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_the_alarm_is_as_rare_as_it_says_under_randomised_response(epsilon: float) -> None:
    """The hardest run that keeps (epsilon, 0): 3,000 runs of 60 coins at an alarm rate of 0.2 a run.

    More alarms than allowed come from a sound test with probability 1e-6 at most.
    """
    generator, runs = np.random.default_rng(3), 3000
    certificate = Certificate(epsilon, None, ((epsilon, 0.0),))
    alarms = 0
    for _ in range(runs):
        included = generator.random(60) < 0.5
        told = np.where(generator.random(60) < expit(epsilon), included, ~included)
        alarms += refutation(told.astype(float), included, certificate, DELTA, 0.8).refuted
    assert alarms <= binom.isf(1e-6, runs, 0.2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("delta", [0.01, 0.05])
def test_the_alarm_is_as_rare_as_it_says_where_delta_betrays_every_coin(delta: float) -> None:
    """A run that shows all coins with probability delta, and none else, keeps (0, delta). False alarms: 1e-6."""
    generator, runs, alarm = np.random.default_rng(4), 4000, 0.05
    certificate = Certificate(0.0, None, ((0.0, delta),))
    alarms = 0
    for _ in range(runs):
        included = generator.random(40) < 0.5
        shown = generator.random() < delta
        scores = included.astype(float) if shown else generator.standard_normal(40)
        alarms += refutation(scores, included, certificate, DELTA, 1 - alarm).refuted
    assert alarms <= binom.isf(1e-6, runs, alarm)


def test_the_least_number_is_the_least_and_more_guesses_accuse_more() -> None:
    known = default()

    def refutes(correct: int) -> bool:
        return coins_refute(lambda chance: known.least_false_negatives(1 - chance), 256, 256, correct, (1 - ALARM) / 4)

    verdicts = [refutes(correct) for correct in range(128, 257)]
    assert all(before <= after for before, after in pairwise(verdicts)), "no more right guesses accuse less"
    assert verdicts.index(True) + 128 == 245


def test_a_header_prices_the_whole_curve() -> None:
    """What is certified at any one delta holds, with a hyper-policy as without."""
    releases = Counter({Release(RATE, OF_TWO): STEPS})
    for inherited in ((), ((Release(0.1, 1.0), 20),)):
        known = run_certificate(header(inherited=inherited), releases)
        assert known.pairs[0] == (known.epsilon, DELTA)
        assert {delta for _, delta in known.pairs} == {*DELTAS, DELTA}
        for epsilon, delta in known.pairs:
            assert epsilon == header(delta, inherited=inherited).price(releases).certified
    assert known.epsilon > default().epsilon


def test_the_numbers_of_guesses_follow_the_certificate_and_share_the_chance() -> None:
    """All coins have a quarter of it; the rest goes where Gaussian scores of the least mu would accuse."""
    chance = 1 - ALARM
    for canaries in (256, 1000, 2048):
        plans = module._plans(default(), canaries, chance)
        assert plans[0] == (canaries, pytest.approx(chance / 4))
        assert sum(part for _, part in plans) == pytest.approx(chance)
        assert len({guesses for guesses, _ in plans}) == len(plans)
    assert [guesses for guesses, _ in module._plans(default(), 256, chance)] == [256, 128]
    best, part = module._plans(default(), 1000, chance)[-1]
    least = module._mu_that_gets(module._needed(default(), 1000, best, part) / best, best / 1000)
    for other in (1000, 500, 100):
        needed = module._needed(default(), 1000, other, part)
        assert needed is not None
        assert least <= module._mu_that_gets(needed / other, other / 1000)


def test_the_share_that_gaussian_scores_get_right_is_the_simulated_one() -> None:
    generator, mu, share, canaries = np.random.default_rng(8), 1.5, 0.25, 200_000
    included = generator.random(canaries) < 0.5
    scores = mu * included + generator.standard_normal(canaries)
    right = right_guesses(scores, included)[: int(share * canaries)].mean()
    assert module._mu_that_gets(float(right), share) == pytest.approx(mu, abs=0.02)


def test_sure_guesses_accuse_where_all_guesses_do_not() -> None:
    """An attacker who knows an eighth of the coins for sure, and nothing of the others."""
    generator, included = np.random.default_rng(5), np.arange(2048) % 2 == 0
    known = generator.permutation(2048) < 300
    scores = np.where(known, np.where(included, 9.0, -9.0), 0.0) + generator.standard_normal(2048)
    found = refutation(scores, included, default(), DELTA, ALARM)
    assert found.refuted
    assert found.guesses < 2048


def test_figures_are_plain_json() -> None:
    found = refutation(*coins(200), default(), DELTA, ALARM).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"alarm_guesses", "alarm_correct", "alarm_needed", "epsilon_refutable", "accusation", "power"}


def test_coins_of_another_file_are_refused() -> None:
    with pytest.raises(DataError, match="all coins are equal"):
        refutation(np.arange(4.0), np.ones(4, dtype=bool), default(), DELTA, ALARM)


def test_an_accusation_rounds_what_is_certified_up() -> None:
    found = Refutation(2.0004, 0.9999, 10, 10, 9, 2.5)
    assert "the certified epsilon 2.01 allows 9 or more" in str(found.accusation)
    assert "the certified epsilon 2.01, and any up to 2.5" in found.power
    assert math.isfinite(found.epsilon_refutable)
