"""Planning: the noise that a budget asks for, the filter of a moving noise, and what has no certified price."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from dptune.core.errors import ConfigError
from dptune.mechanisms.agents.policy_file import SavedPolicy
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.planning import Calibrated, Schedule, calibrated, noise_options, planned, price
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import pld_epsilon
from dptune.privacy.accounting.published_accountants import plrvo_epsilon, plrvo_one_coordinate_epsilon
from dptune.privacy.accounting.strategy import error
from dptune.privacy.ledger import Ledger
from dptune.privacy.ledger_file import read_ledger
from dptune.privacy.release import Release
from dptune.privacy.run_header import RunHeader
from dptune.privacy.samplers.sampler import POISSON, Sampler

torch.set_num_threads(1)

RLDP = Schedule(sample_rate=16 / 73271, steps=13740, delta=1e-5)
SHORT = Schedule(sample_rate=0.2, steps=40, delta=1e-5)


def built(name: str, pairs: int = 2, **options: Any) -> Callable[[float], Mechanism]:
    return lambda noise: build(name, {"pairs": pairs, "noise_multiplier": noise} | options)


def header(found: Calibrated, epsilon: float, accounting: str = "certified") -> RunHeader:
    return RunHeader("rldp", "gdp_clt", accounting, epsilon, 1e-5, "record", 73271, renyi_filter=found.renyi_filter)


def test_rldp_on_24_pairs_needs_a_sigma_of_two_and_a_half() -> None:
    """The specification's 2.504 a pair, which is worth 0.511; the paper's accountant asks for 0.41."""
    found = calibrated(built("rldp", 24), 2.0, RLDP, "certified")
    mechanism = found.mechanism
    assert mechanism.noise.noise_multiplier == pytest.approx(2.504, abs=1e-3)
    assert mechanism.effective_noise_multiplier(mechanism.knobs()) == pytest.approx(0.511, abs=5e-4)
    assert found.renyi_filter is None
    assert 1.99 < price(mechanism, RLDP).certified <= 2.0


def test_a_moving_sigma_gets_a_filter_and_the_noise_that_fills_it() -> None:
    """The specification's order 5.7 and multiplier 0.5976: 17 % more noise than under a constant sigma."""
    found = calibrated(built("rldp", 24, move_noise=True), 2.0, RLDP, "certified")
    mechanism, renyi_filter = found.mechanism, found.renyi_filter
    assert renyi_filter is not None
    assert renyi_filter.order == pytest.approx(5.7, abs=0.1)
    assert mechanism.effective_noise_multiplier(mechanism.knobs()) == pytest.approx(0.5976, rel=2e-3)
    assert mechanism.noise.noise_multiplier == pytest.approx(0.5976 * 24**0.5, rel=2e-3)
    plan = planned(mechanism, RLDP)
    assert plan.total() == RLDP.steps
    assert header(found, 2.0).within_budget(plan)
    assert not header(found, 2.0).within_budget(planned(mechanism, replace(RLDP, steps=RLDP.steps + 1)))


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
@pytest.mark.parametrize("design", ["A", "AB"])
def test_a_plan_behind_the_filter_may_start_at_any_budget(epsilon: float, design: str) -> None:
    found = calibrated(built("rldp", move_noise=True, design=design), epsilon, SHORT, "certified")
    assert header(found, epsilon).within_budget(planned(found.mechanism, SHORT))
    assert price(found.mechanism, SHORT, found.renyi_filter).certified == pytest.approx(epsilon, rel=1e-6)


def test_without_its_filter_a_moving_sigma_has_no_certified_price() -> None:
    priced = price(built("rldp", move_noise=True)(10.0), SHORT)
    assert priced.certified == math.inf
    assert priced.leaks == ("noise chosen from earlier releases without a filter fixed in advance",)


@pytest.mark.parametrize(
    ("name", "leak"),
    [("rldp_published", "raw medians"), ("rldp_published", "raw batch loss"), ("autoclip_published", "raw")],
)
def test_a_mechanism_that_leaks_is_refused_under_certified_accounting(name: str, leak: str) -> None:
    """The message names the leak and the way out; the noise is not searched for."""
    tried: list[float] = []

    def build_with(noise: float) -> Mechanism:
        tried.append(noise)
        return built(name)(noise)

    with pytest.raises(ConfigError, match=leak) as refusal:
        calibrated(build_with, 2.0, RLDP, "certified")
    assert name in str(refusal.value)
    assert "published or noise_only" in str(refusal.value)
    assert len(tried) == 1


def hyper_policy(folder: Path, leaks: tuple[str, ...] = (), sampler: Sampler = POISSON) -> str:
    """One that 20 releases were charged for."""
    releases = Counter({Release(0.2, 4.0, sampler=sampler): 20})
    SavedPolicy("other run", "1", "record", {}, 0, 0, releases, leaks, {}).write(folder)
    return str(folder)


@pytest.mark.parametrize("moves", [False, True])
def test_a_hyper_policy_that_leaks_is_refused_under_certified_accounting(tmp_path: Path, moves: bool) -> None:
    source = hyper_policy(tmp_path, ("raw norms",))
    with pytest.raises(ConfigError, match="other run: raw norms"):
        calibrated(built("rldp", init_from=source, move_noise=moves), 2.0, SHORT, "certified")


def test_a_hyper_policy_is_paid_for_by_the_run_that_starts_from_it(tmp_path: Path) -> None:
    """The budget holds for both together, so the run itself gets more noise than without."""
    source = hyper_policy(tmp_path)
    found = calibrated(built("rldp", init_from=source), 2.0, SHORT, "certified").mechanism
    together = planned(found, SHORT) + Counter({Release(0.2, 4.0): 20})
    assert 1.99 < pld_epsilon(together, 1e-5) <= 2.0
    assert price(found, SHORT).certified == pytest.approx(pld_epsilon(together, 1e-5))
    assert pld_epsilon(planned(found, SHORT), 1e-5) < 1.9


def test_a_hyper_policy_and_a_moving_sigma_are_not_priced_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="move_noise"):
        calibrated(built("rldp", init_from=hyper_policy(tmp_path), move_noise=True), 2.0, SHORT, "certified")


BINS = Sampler("balls_in_bins", batches=5)


@pytest.mark.parametrize(("before", "now"), [(POISSON, BINS), (BINS, POISSON), (BINS, BINS)])
def test_a_hyper_policy_goes_with_poisson_sampling_alone(tmp_path: Path, before: Sampler, now: Sampler) -> None:
    """Nor with a noise that is given: counts of two runs by bins would be priced as epochs of one."""
    mechanism = built("rldp", agent="linear", init_from=hyper_policy(tmp_path, sampler=before))
    schedule = replace(SHORT, sampler=now)
    with pytest.raises(ConfigError, match=r"init_from: .* no bound prices balls_in_bins together"):
        planned(mechanism(1.0), schedule)
    with pytest.raises(ConfigError, match=r"init_from: .* no bound prices balls_in_bins together"):
        calibrated(mechanism, 2.0, schedule, "certified")


def test_the_claim_of_plrvo_needs_the_number_of_parameters() -> None:
    """Its accountant counts infinity without, which no noise brings down."""
    with pytest.raises(ConfigError, match=r"^dimension: is not given.* Fix: give their number"):
        calibrated(lambda z: build("plrvo", {"noise_multiplier": z}), 1.0, SHORT, "published")


def test_the_claim_of_plrvo_is_met_at_the_dimension_that_it_was_calibrated_at() -> None:
    """PLRV-O's accountant counts trained parameters: noise calibrated for fewer would claim more than the budget."""
    found = {
        dimension: calibrated(
            lambda z, dimension=dimension: build("plrvo", {"noise_multiplier": z, "dimension": dimension}),
            1.0,
            SHORT,
            "published",
        ).mechanism
        for dimension in (1, 100, 1000)
    }
    noises = [mechanism.noise.noise_multiplier for mechanism in found.values()]
    assert noises == sorted(set(noises)), "more coordinates claim more"
    for dimension, mechanism in found.items():
        (release,) = planned(mechanism, SHORT)
        assert dict(release.claims) == {"dimension": float(dimension)}
        for other in found:
            priced = replace(release, claims=(("dimension", float(other)),))
            claim = plrvo_epsilon(Counter({priced: SHORT.steps}), SHORT.delta)
            if other == dimension:
                assert 0.999 < claim <= 1.0
                assert claim == price(mechanism, SHORT).published
            else:
                assert (claim > 1.01) is (other > dimension)
                assert (claim < 0.99) is (other < dimension)
        one = plrvo_one_coordinate_epsilon(Counter({release: SHORT.steps}), SHORT.delta)
        assert (one == pytest.approx(1.0, abs=1e-3)) is (dimension == 1)


@pytest.mark.parametrize("accounting", ["published", "noise_only"])
def test_other_accountings_price_what_leaks_and_never_certify_it(accounting: str) -> None:
    found = calibrated(built("rldp_published"), 2.0, SHORT, accounting)
    priced = price(found.mechanism, SHORT)
    assert 1.99 < getattr(priced, accounting) <= 2.0
    assert (priced.certified, found.renyi_filter) == (math.inf, None)


def test_statistics_cost_noise_on_the_gradients_and_not_budget() -> None:
    plain, with_statistics = (
        calibrated(built("rldp", design=design), 2.0, SHORT, "certified").mechanism for design in ("A", "AB")
    )
    assert with_statistics.noise.noise_multiplier == plain.noise.noise_multiplier
    scales = [mechanism.scales(mechanism.knobs())[0] for mechanism in (plain, with_statistics)]
    assert scales[1] / scales[0] == pytest.approx(1.01015, rel=1e-5)


def test_the_plan_is_one_release_as_often_as_there_are_steps() -> None:
    mechanism = built("rldp")(3.0)
    assert planned(mechanism, SHORT) == Counter({mechanism.release(mechanism.knobs(), 0.2): 40})


#: (epsilon, delta, units, batch, steps, bands) and the sigma that an independent accountant found for it.
BANDED = [
    (2.0, 1e-5, 4576, 64, 72, 8, 1.23257),
    (0.5, 1e-5, 4576, 64, 72, 16, 4.09871),
    (8.0, 1e-5, 4320, 64, 102, 4, 0.60251),
    (2.0, 1e-5, 73271, 64, 172, 16, 0.69247),
    (2.0, 1e-5, 73271, 64, 172, 43, 0.80287),
    (2.0, 1e-5, 4576, 64, 72, 9, 1.27537),
    (8.0, 1e-5, 1000, 10, 100, 10, 0.61199),
    (1.0, 1e-6, 10000, 100, 1000, 20, 6.22763),
    (1.0, 1e-5, 1000, 100, 40, 10, 7.46126),
]


def banded(**options: Any) -> Callable[[float], Mechanism]:
    return built("banded", **options)


@pytest.mark.parametrize(("epsilon", "delta", "units", "batch", "steps", "bands", "sigma"), BANDED)
def test_correlated_noise_gets_the_sigma_of_its_group(
    epsilon: float, delta: float, units: int, batch: int, steps: int, bands: int, sigma: float
) -> None:
    """Four of these are jax_privacy's to six digits. Ours never has less noise, and at most 1 in 1,000 more."""
    schedule = Schedule(batch / units, steps, delta)
    found = calibrated(banded(bands=bands), epsilon, schedule, "certified").mechanism
    assert sigma * (1 - 1e-5) <= found.noise.noise_multiplier <= sigma * (1 + 1e-3)
    priced = price(found, schedule)
    assert priced.certified == priced.published == priced.noise_only
    assert 0.999 * epsilon < priced.certified <= epsilon


REFERENCE_RUN = Schedule(64 / 4576, 72, 1e-5)


@pytest.mark.parametrize("bands", [1, 8, 64])
def test_a_ledger_accepts_what_was_calibrated_for_it(tmp_path: Path, bands: int) -> None:
    """To the last digit of the budget, however many parts the plan has."""
    found = calibrated(banded(bands=bands), 2.0, REFERENCE_RUN, "certified").mechanism
    header = RunHeader("banded", "bandmf", "certified", 2.0, 1e-5, "record", 4576)
    with Ledger.create(tmp_path / "ledger.jsonl", header, planned(found, REFERENCE_RUN)) as ledger:
        for row in range(72):
            ledger.charge(found.release(found.knobs(), REFERENCE_RUN.sample_rate, row))
    assert 1.998 < read_ledger(tmp_path / "ledger.jsonl").epsilons.certified <= 2.0


def test_the_plan_spreads_over_the_groups() -> None:
    schedule = replace(REFERENCE_RUN, steps=75)
    plan = planned(calibrated(banded(bands=8), 2.0, schedule, "certified").mechanism, schedule)
    assert [count for _, count in sorted(plan.items(), key=lambda item: item[0].part or 0)] == [10] * 3 + [9] * 5
    assert {release.sample_rate for release in plan} == {8 * 64 / 4576}


@pytest.mark.parametrize(
    ("epsilon", "units", "batch", "steps", "best"),
    [
        (0.5, 4576, 64, 72, 2),
        (2.0, 4576, 64, 72, 8),
        (8.0, 4576, 64, 72, 16),
        (0.5, 73271, 64, 172, 16),
        (2.0, 73271, 64, 172, 32),
        (8.0, 73271, 64, 172, 32),  # 64 have less, and are more than a quarter of the steps
        (2.0, 73271, 64, 1145, 64),
        (0.5, 42061, 1024, 410, 1),
        (2.0, 42061, 1024, 410, 4),
    ],
)
def test_the_number_of_bands_has_the_least_expected_error(
    epsilon: float, units: int, batch: int, steps: int, best: int
) -> None:
    """The specification's table has the mean error at every number of bands; these are its least, of at most a
    quarter of the steps.
    """
    schedule = Schedule(batch / units, steps, 1e-5)
    assert calibrated(banded(objective="mean"), epsilon, schedule, "certified").mechanism.bands == best


def test_by_default_the_number_of_bands_leaves_the_least_noise_of_recent_steps() -> None:
    """Written out: what the last weights hold, if a hundredth of an error is mended in each step."""
    steps, left = 172, {}
    schedule, weights = Schedule(64 / 73271, steps, 1e-5), 0.99 ** np.arange(steps)[::-1]
    for bands in (1, 2, 4, 8, 16, 32):
        noise = calibrated(banded(bands=bands), 2.0, schedule, "certified").mechanism.noise
        column = np.zeros(steps)
        column[:bands] = noise.coefficients or 1.0
        rows = np.linalg.inv(np.tril(toeplitz(column)))
        left[bands] = noise.noise_multiplier * np.linalg.norm(weights @ rows)
    found = calibrated(banded(), 2.0, schedule, "certified").mechanism
    assert found.bands == min(left, key=lambda bands: left[bands]) == 16
    assert left[16] < 0.51 * left[1]


def test_in_a_long_run_the_sum_of_all_steps_asks_for_more_bands_than_its_weights_remember() -> None:
    """128 bands leave the least in the sum of an epoch, and 1.6 times as much of the last hundred steps as 16."""
    schedule = Schedule(64 / 73098, 1143, 1e-5)
    by = {name: calibrated(banded(objective=name), 2.0, schedule, "certified").mechanism for name in ("recent", "last")}
    assert (by["recent"].bands, by["last"].bands) == (16, 128)
    left = {name: one.noise.noise_multiplier * error(one.coefficients, 1143, "recent") for name, one in by.items()}
    assert left["last"] / left["recent"] == pytest.approx(1.66, abs=0.02)


def test_one_band_is_the_plan_and_the_noise_of_static() -> None:
    """A run of large batches at a small epsilon gains nothing, and loses nothing either."""
    schedule = Schedule(1024 / 42061, 410, 1e-5)
    ours, static = (calibrated(one, 0.5, schedule, "certified").mechanism for one in (banded(), built("static")))
    assert planned(ours, schedule) == planned(static, schedule)


def test_a_budget_of_a_paper_buys_correlated_noise_at_the_same_price() -> None:
    found = calibrated(banded(bands=8), 2.0, REFERENCE_RUN, "published").mechanism
    assert found.noise.noise_multiplier == pytest.approx(1.23257, rel=1e-3)


def test_more_bands_than_steps_or_than_units_allow_are_refused() -> None:
    for bands, said in ((73, "use at most 72"), (72, "use at most 71")):
        with pytest.raises(ConfigError, match=said) as caught:
            calibrated(banded(bands=bands), 2.0, REFERENCE_RUN, "certified")
        assert caught.value.field == "bands"


@pytest.mark.parametrize("name", ["static", "banded"])
def test_the_same_noise_is_built_again_for_another_run(name: str) -> None:
    found = calibrated(built(name), 2.0, REFERENCE_RUN, "certified").mechanism
    again = build(name, {"pairs": 2, **noise_options(found)})
    assert planned(again, REFERENCE_RUN) == planned(found, REFERENCE_RUN)
