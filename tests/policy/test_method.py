"""Prices of DP policy gradient: exact Gaussian, one use per user, parallel composition, and the raw critic."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from dptune.core.errors import ConfigError
from dptune.policy.method import RAW_CRITIC, Dppg, calibrated_method, check_accounting, method_of
from dptune.privacy.accountants import epsilons, gdp_delta
from dptune.privacy.accounting.parts import disjoint
from dptune.privacy.release import Release

EXACT = {
    **{0.01: 5425.5, 0.05: 284.39, 0.1: 91.82, 0.25: 24.38, 0.5: 9.997, 1.0: 4.377},
    **{2.0: 1.993, 3.0: 1.271, 4.0: 0.926, 5.0: 0.7255, 6.0: 0.5945},
}
#: The paper's rule: theorem 5 of Zhao et al. up to z = 4, the classical one above 4.845 (spec, section 4).
PUBLISHED = {0.01: 5450.0, 0.05: 290.0, 0.1: 95.0, 0.25: 26.0, 0.5: 11.0, 1.0: 5.0, 2.0: 2.375, 3.0: 1.556, 4.0: 1.156}


@pytest.mark.parametrize(("noise", "epsilon"), EXACT.items())
def test_the_certified_epsilon_is_the_exact_gaussian_one(noise: float, epsilon: float) -> None:
    """Property t4 of the spec, and its table at delta 1e-5."""
    certified = Dppg(noise_multiplier=noise).price(1e-5).certified
    assert certified == pytest.approx(epsilon, rel=5e-4)
    assert gdp_delta(1 / noise, certified) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(("noise", "epsilon"), PUBLISHED.items())
def test_the_published_epsilon_is_the_papers(noise: float, epsilon: float) -> None:
    assert Dppg(noise_multiplier=noise).price(1e-5).published == pytest.approx(epsilon, rel=3e-4)


def test_the_papers_rule_changes_where_epsilon_is_one() -> None:
    """The published epsilon jumps as in figure 3, at C1 = 4.8448 (delta 1e-5) and 3.7765 (delta 1e-3)."""
    assert Dppg(noise_multiplier=4.85).price(1e-5).published == pytest.approx(4.8448 / 4.85, rel=1e-4)
    assert Dppg(noise_multiplier=3.78).price(1e-3).published == pytest.approx(3.7765 / 3.78, rel=1e-4)
    assert Dppg(noise_multiplier=4.84).price(1e-5).published < 0.96  # the rule changes there, and epsilon jumps up


@pytest.mark.parametrize(("epsilon", "noise"), [(0.5, 7.0318), (1, 3.7306), (3, 1.3906), (8, 0.6002)])
def test_calibration_finds_the_specs_noise(epsilon: float, noise: float) -> None:
    found = calibrated_method({}, epsilon, 1e-5)
    assert found.noise_multiplier == pytest.approx(noise, rel=2e-4)
    assert found.price(1e-5).certified <= epsilon


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_policy_and_critic_share_one_mechanism(share: float) -> None:
    method = Dppg(noise_multiplier=1.3, critic_share=share)
    assert sum(z**-2 for z in method.multipliers) == pytest.approx(1.3**-2)
    assert method.multipliers[1] ** -2 * 1.3**2 == pytest.approx(share)


def test_the_length_of_a_run_costs_nothing_and_reuse_does() -> None:
    method = Dppg(noise_multiplier=1.0, critic="none")
    long = epsilons(method.planned(1000), 1e-5, published_accountant="dppg")
    assert long == method.price(1e-5)
    twice = epsilons(Counter({method.release(0): 2}), 1e-5)
    assert twice.certified == pytest.approx(Dppg(noise_multiplier=math.sqrt(0.5)).price(1e-5).certified)


def test_releases_about_all_add_to_every_part() -> None:
    everybody = Release(1.0, 3.0)
    composition = Counter({Release(1.0, 1.0, part=0): 1, Release(1.0, 2.0, part=1): 1, everybody: 1})
    assert len(disjoint(composition)) == 2
    assert epsilons(composition, 1e-5) == epsilons(Counter([Release(1.0, 1.0), everybody]), 1e-5)


def test_parts_of_an_inherited_run_are_not_those_of_this_run() -> None:
    """A user of part 0 in one run may be in part 1 of the other, so the dearest parts of both add up."""
    mine = Counter({Release(1.0, 1.0, part=0): 1, Release(1.0, 2.0, part=1): 1})
    theirs = Counter({Release(1.0, 4.0, part=0): 1, Release(1.0, 1.0, part=1): 1})
    both = epsilons(mine, 1e-5, inherited=theirs)
    assert both.certified == epsilons(Counter({Release(1.0, 1.0): 2}), 1e-5).certified


def test_a_raw_critic_certifies_nothing() -> None:
    raw = Dppg(noise_multiplier=1.0, critic="raw").price(1e-5)
    assert (raw.certified, raw.leaks) == (math.inf, (RAW_CRITIC,))
    assert raw.published == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize(("options", "field"), [({"noise_multiplier": 0.0}, "noise_multiplier"),
                                                ({"noise_multiplier": 1.0, "critic": "raw"}, "critic")])  # fmt: skip
def test_certified_accounting_refuses_what_has_no_epsilon(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_accounting(method_of(options), 1e-5, "certified")
    assert caught.value.field == field
    check_accounting(method_of(options), 1e-5, "published")


@pytest.mark.parametrize(
    "options",
    [{}, {"noise_multiplier": -1}, {"noise_multiplier": "nan"},
     {"noise_multiplier": 1e300}, {"noise_multiplier": 1e-162}, {"noise_multiplier": 1, "critic": "some"},
     {"noise_multiplier": 1, "critic_share": 1}, {"noise_multiplier": 1, "z": 1}],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        method_of(options)


def test_a_raw_critic_cannot_be_calibrated() -> None:
    with pytest.raises(ConfigError, match="no noise"):
        calibrated_method({"critic": "raw"}, 1.0, 1e-5)
