"""The guarantee behind every finite epsilon: one unit more moves a release by at most what the ledger is told.

All sound mechanisms, at their start and after hostile releases have moved their knobs; and the same test shows
what the two leaky ones get wrong. Also P0.2, P0.3 and P0.8 of the specification, and checkpoints.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mechanism_steps import (
    EXPECTED,
    RATE,
    SIZES,
    batch_of,
    observed,
    plain,
    privatised,
    shift,
    started,
    sums,
    zeros,
)

from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.controllers.control import Constant
from dptune.mechanisms.interfaces import Knobs, Observation, Released
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.gaussian import Gaussian
from dptune.mechanisms.registry import CLIPPERS, CONTROLLERS, MECHANISMS
from dptune.privacy.entropy import FixedSeed
from dptune.training.gradients.per_sample import PairGradients

torch.set_num_threads(1)

#: An agent that acts at every step.
BUSY = {"interval": 1, "warmup": 0, "rounds": 1, "batch_size": 2}
Entry = tuple[str, dict[str, Any]]
SOUND: dict[str, Entry] = {
    "dp_lora_fed": ("dp_lora_fed", {}),
    "static": ("static", {}),
    "per_pair": ("per_pair", {}),
    "banded": ("banded", {"bands": 3}),
    "per_pair, global": ("per_pair", {"allocation": "global", "pair_radius": 2.0, "stabiliser": 0.1}),
    "per_pair, weights": ("per_pair", {"allocation": "global", "weights": (1.0, 2.0, 30.0)}),
    "per_pair, RLDP's noise": ("per_pair", {"noise_unit": "pair", "noise_multiplier": 0.4}),
    "dp_lora": ("dp_lora", {"freeze_down": True}),
    "adaclip": ("adaclip", {"mean_decay": 0.5, "variance_decay": 0.5}),
    "quantile": ("quantile", {}),
    "quantile, few counts": ("quantile", {"count_noise": 0.51, "rate": 3.0}),
    "quantile, per pair": ("quantile", {"clipper": "per_pair", "rate": 3.0}),
    "quantile, per pair, global": ("quantile", {"clipper": "per_pair", "allocation": "global", "rate": 3.0}),
    "quantile, per pair, weights": ("quantile", {"clipper": "per_pair", "weights": "3,1,0.1", "rate": 3.0}),
    "quantile, RLDP's noise": ("quantile", {"clipper": "per_pair", "noise_unit": "pair", "rate": 3.0}),
    "quantile, auto_s": ("quantile", {"clipper": "auto_s"}),
    "auto_s": ("auto_s", {"max_grad_norm": 0.3}),
    "dc_sgd_p": ("dc_sgd_p", {"memory": 0.0}),
    "dc_sgd_p, dear": ("dc_sgd_p", {"histogram_noise": 1.01, "bins": 2}),
    "dc_sgd_e": ("dc_sgd_e", {}),
    "dc_sgd_e, psac": ("dc_sgd_e", {"clipper": "psac"}),
    "psac": ("psac", {"r": 0.01}),
    "geoclip": ("geoclip", {"rank": 3, "mean_decay": 0.5, "covariance_decay": 0.5}),
    "geoclip, as printed": ("geoclip", {"rank": 3, "explore": 0.0, "directions": "axes"}),
    "geoclip, full": ("geoclip", {"rank": 0, "explore": 0.0, "covariance_decay": 0.5}),
    "laplace": ("laplace", {}),
    "plrvo": ("plrvo", {}),
    "plrvo, quantile": ("plrvo", {"controller": "quantile"}),
    "lmo_dp": ("lmo_dp", {}),
    "lmo_dp, per pair": ("lmo_dp", {"preset": "T5", "clipper": "per_pair"}),
    "rldp A": ("rldp", BUSY),
    "rldp A, joint": ("rldp", BUSY | {"noise_unit": "joint", "allocation": "global"}),
    "rldp A, moving sigma": ("rldp", BUSY | {"move_noise": True}),
    "rldp AB": ("rldp", BUSY | {"design": "AB"}),
    "rldp AB, dear": ("rldp", BUSY | {"design": "AB", "statistics_share": 0.9, "move_noise": True}),
}
MOVES = [label for label, (name, _) in SOUND.items() if MECHANISMS[name].parts["controller"] != "constant"]

VALUES = [0.0, 1e-45, 1e-30, 1e-7, 0.3, 1.0, 1e4, 1e18, 1e30, 3e38, math.nan, math.inf]
HOSTILE = st.builds(math.copysign, st.sampled_from(VALUES) | st.floats(0, 50, width=32), st.sampled_from([1, -1]))
LOSSES = st.sampled_from([0.0, 2.9, -1e30, 1e30, math.nan, math.inf, -math.inf])

Unit = tuple[list[float], float]
COORDINATES = sum(SIZES)
SATURATING: Unit = ([1e9] * COORDINATES, 1e30)


def _pairwise(values: list[float]) -> list[float]:
    return [value for value, size in zip(values, SIZES, strict=True) for _ in range(size)]


ROWS = st.lists(HOSTILE, min_size=3, max_size=3).map(_pairwise) | st.lists(
    HOSTILE, min_size=COORDINATES, max_size=COORDINATES
)
UNITS: st.SearchStrategy[Unit] = st.tuples(ROWS, LOSSES)
BATCHES = st.lists(UNITS, max_size=4)


def gradients(units: list[Unit]) -> PairGradients:
    return batch_of([row for row, _ in units], [loss for _, loss in units])


def exaggerated(released: Released, step: int) -> Released:
    """A release that no batch and hardly any noise would give."""
    factors = [10.0 ** (2 * (-1) ** (step + index)) for index in range(len(released.gradient))]
    wild = replace(
        released,
        gradient=[part * factor for part, factor in zip(released.gradient, factors, strict=True)],
        blocks=[block * 30 for block in released.blocks],
    )
    if released.statistics is None:
        return wild
    signs = torch.tensor([(-1.0) ** (step // 3 + index) for index in range(len(released.statistics))])
    return replace(wild, statistics=released.statistics + 20 * signs)


@cache
def moved(label: str, steps: int) -> Mechanism:
    """The mechanism after some hostile steps; not to be moved any further."""
    name, entry = SOUND[label]
    mechanism = started(name, **entry)
    rng = np.random.default_rng(steps)
    for step in range(1, steps + 1):
        rows = rng.standard_normal((5, COORDINATES)) * 10.0 ** rng.integers(-3, 4, (5, 1))
        released = privatised(mechanism, [batch_of(rows, rng.standard_normal(5))], seed=step)
        hostile = observed(exaggerated(released, step), step, public_loss=(-1) ** step * 10.0, spent=step / 4)
        mechanism.controller.observe(hostile)
    return mechanism


def test_every_mechanism_that_claims_a_finite_epsilon_is_judged_here() -> None:
    claiming = {
        name
        for name in MECHANISMS
        if name != "nonprivate" and not (mechanism := started(name)).release(mechanism.knobs(), RATE).leaks
    }
    assert (
        claiming
        == {name for name, _ in SOUND.values()}
        == set(MECHANISMS)
        - {
            "nonprivate",
            "rldp_published",
            "autoclip_published",
        }
    )
    assert all((MECHANISMS[name].verdict == "Sound") == (name in claiming) for name in MECHANISMS)
    clippers = {type(moved(label, 0).clipper) for label in SOUND}
    controllers = {type(moved(label, 0).controller) for label in SOUND}
    assert clippers == set(CLIPPERS.values()) - {CLIPPERS["none"]}
    assert controllers == set(CONTROLLERS.values()) - {CONTROLLERS["raw_quantile"], CONTROLLERS["rldp_published"]}


@pytest.mark.parametrize("label", MOVES)
@pytest.mark.parametrize("steps", [1, 6])
def test_the_hostile_releases_do_move_the_knobs(label: str, steps: int) -> None:
    assert plain(moved(label, steps).knobs()) != plain(moved(label, 0).knobs())


@pytest.mark.parametrize("label", SOUND)
@settings(max_examples=25)
@given(batch=BATCHES, extra=UNITS, apart=st.booleans(), steps=st.sampled_from([0, 1, 6]))
@example(batch=[], extra=SATURATING, apart=False, steps=0)
@example(batch=[], extra=SATURATING, apart=False, steps=6)
@example(batch=[SATURATING] * 3, extra=([0.0] * COORDINATES, math.nan), apart=True, steps=6)
@example(batch=[([1e-30] * COORDINATES, 0.0)], extra=([math.nan] * COORDINATES, -1e30), apart=True, steps=1)
def test_one_unit_moves_a_release_by_at_most_its_sensitivity(
    label: str, batch: list[Unit], extra: Unit, apart: bool, steps: int
) -> None:
    mechanism = moved(label, steps)
    without = [gradients(batch)] if batch else []
    whole = [*without, gradients([extra])] if apart else [gradients([*batch, extra])]
    assert shift(mechanism, whole, without) <= mechanism.release(mechanism.knobs(), RATE).sensitivity * (1 + 1e-6)


@pytest.mark.parametrize("label", SOUND)
@pytest.mark.parametrize("steps", [0, 6])
def test_a_unit_that_saturates_everything_attains_the_sensitivity(label: str, steps: int) -> None:
    """No less, so the noise is not wasted and the test above can fail. The loss of design AB counts once it acted."""
    mechanism = moved(label, steps)
    release = mechanism.release(mechanism.knobs(), RATE)
    waits_for_public_loss = label.startswith("rldp AB") and steps == 0
    assert release.effective_noise_multiplier > 0
    ratio = shift(mechanism, [gradients([SATURATING])], []) / release.sensitivity
    if waits_for_public_loss:
        assert 0.7 < ratio < 1
    else:
        assert ratio == pytest.approx(1, rel=2e-6)


@pytest.mark.parametrize("label", SOUND)
@settings(max_examples=10)
@given(batch=st.lists(UNITS, min_size=1, max_size=5), steps=st.sampled_from([0, 6]))
def test_p03_a_units_part_does_not_depend_on_the_others(label: str, batch: list[Unit], steps: int) -> None:
    mechanism = moved(label, steps)
    together = sums(mechanism, [gradients(batch)])
    reversed_ = sums(mechanism, [gradients(batch[::-1])])
    alone = [sums(mechanism, [gradients([unit])]) for unit in batch]
    for whole, backwards, parts in zip(together, reversed_, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(whole, torch.stack(parts).sum(dim=0), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(whole, backwards, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", SOUND)
def test_knobs_and_charge_of_a_step_do_not_change_when_its_batch_is_used(label: str) -> None:
    """A clipper or controller that remembers raw data would show here."""
    mechanism = started(SOUND[label][0], **SOUND[label][1])
    knobs, release = plain(mechanism.knobs()), mechanism.release(mechanism.knobs(), RATE)
    privatised(mechanism, [gradients([SATURATING])])
    assert plain(mechanism.knobs()) == knobs
    assert mechanism.release(mechanism.knobs(), RATE) == release


@pytest.mark.parametrize("label", SOUND)
def test_p08_the_same_releases_give_the_same_knobs_whatever_the_raw_data(label: str) -> None:
    """Both touch raw data of their own; both are shown the same releases."""
    name, entry = SOUND[label]
    one, other = started(name, **entry), started(name, **entry)
    for step in range(1, 4):
        released = privatised(one, [batch_of(np.full((3, COORDINATES), 0.01), np.ones(3))], seed=step)
        privatised(other, [gradients([SATURATING] * 7)], seed=100 + step)
        for mechanism in (one, other):
            mechanism.controller.observe(observed(exaggerated(released, step), step))
        assert plain(one.knobs()) == plain(other.knobs())
        assert one.scales(one.knobs()) == other.scales(other.knobs())
        assert one.release(one.knobs(), RATE) == other.release(other.knobs(), RATE)


def saved(mechanism: Mechanism) -> dict[str, Any]:
    """The controller's state as a checkpoint keeps it: tensors, and JSON without NaN."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else json.loads(json.dumps(value, allow_nan=False))
        for key, value in mechanism.controller.state_dict().items()
    }


LEAKY: dict[str, Entry] = {
    "rldp_published": ("rldp_published", {"interval": 1, "warmup": 2, "rounds": 1, "batch_size": 2}),
    "autoclip_published": ("autoclip_published", {}),
}


@pytest.mark.parametrize("label", SOUND | LEAKY)
@pytest.mark.parametrize("before", [0, 3])
def test_a_controller_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(label: str, before: int) -> None:
    """The last batch is empty: even then nothing may come from what was not saved."""
    name, entry = (SOUND | LEAKY)[label]
    original = started(name, **entry)
    rng = np.random.default_rng(1)

    def step(number: int, *others: Mechanism, units: int = 4) -> None:
        batch = [batch_of(rng.standard_normal((units, COORDINATES)), np.ones(units))] if units else []
        released = privatised(original, batch, seed=number)
        for other in others:
            again = privatised(other, batch, seed=number)
            assert plain(again.knobs) == plain(released.knobs)
            assert all(torch.equal(a, b) for a, b in zip(again.blocks, released.blocks, strict=True))
        for mechanism in (original, *others):
            mechanism.controller.observe(observed(exaggerated(released, number), number, spent=number / 20))

    for number in range(1, before + 1):
        step(number)
    loaded = started(name, **entry)
    loaded.controller.load_state_dict(saved(original))
    for number, units in enumerate([0, 4, 4, 0], start=before + 1):
        step(number, loaded, units=units)
    assert plain(original.knobs()) == plain(loaded.knobs())


@pytest.mark.parametrize("label", SOUND)
def test_a_sound_controller_refuses_raw_data_or_ignores_it(label: str) -> None:
    """Design A and AB of RLDP may start from a policy that leaked, so they are offered raw data; they read none."""
    name, entry = SOUND[label]
    mechanism, knobs = started(name, **entry), moved(label, 0).knobs()
    before = plain(mechanism.knobs())
    if name == "rldp":
        assert mechanism.controller.peek(torch.full((2, 3), 1e6), torch.ones(2), torch.ones(2), knobs) is knobs
    else:
        with pytest.raises(NotImplementedError, match="raw data"):
            mechanism.controller.peek(torch.full((2, 3), 1e6), torch.ones(2), torch.ones(2), knobs)
    assert mechanism.controller.raw_inputs == ()
    assert plain(mechanism.knobs()) == before


@dataclass
class Curious(Constant):
    """Would leak if it were given anything."""

    raw_inputs: tuple[str, ...] = ()  # type: ignore[assignment]
    looks: list[torch.Tensor] = field(default_factory=list)

    def peek(self, norms: torch.Tensor, losses: torch.Tensor, tokens: torch.Tensor, knobs: Knobs) -> Knobs:
        self.looks.append(norms)
        return knobs


def test_raw_data_goes_only_to_a_controller_that_declares_it() -> None:
    declared, silent = Curious(("norms",)), Curious()
    batch = [gradients([SATURATING])]
    for controller in (declared, silent):
        mechanism = Mechanism("curious", Flat(), Gaussian(1.0), controller, "gdp_clt", len(SIZES))
        privatised(mechanism, batch)
        assert mechanism.release(mechanism.knobs(), RATE).leaks == controller.raw_inputs
    assert (len(declared.looks), len(silent.looks)) == (1, 0)


def test_an_observation_has_no_place_for_raw_data() -> None:
    assert {item.name for item in fields(Observation)} == {
        "releases",
        "released",
        "spent",
        "public_loss",
        "adapter_figures",
    }
    assert {item.name for item in fields(Released)} == {"gradient", "blocks", "statistics", "knobs", "deviations"}


@pytest.mark.parametrize("label", SOUND)
@pytest.mark.parametrize("steps", [0, 6])
def test_all_of_a_release_is_a_function_of_its_noisy_sums(label: str, steps: int) -> None:
    """The noise here is drawn again from the same seed: nothing but the noisy sums is left to look at."""
    mechanism = moved(label, steps)
    knobs, batch = mechanism.knobs(), [batch_of(np.ones((3, COORDINATES)), np.ones(3))]
    released = privatised(mechanism, batch, seed=9)
    noisy = _noisy(mechanism, batch, seed=9)
    statistics = [] if released.statistics is None else [released.statistics]
    assert all(torch.equal(a, b) for a, b in zip([*released.blocks, *statistics], noisy, strict=True))
    again = mechanism.clipper.restore(released.blocks, zeros(), knobs, EXPECTED)
    assert all(torch.equal(a, b) for a, b in zip(released.gradient, again, strict=True))
    assert plain(released.knobs) == plain(knobs)
    scales = mechanism.scales(knobs)[: len(released.blocks)]
    gaussian = mechanism.noise.family == "gaussian"
    unit = knobs.noise_multiplier if gaussian else mechanism.noise.deviation(knobs.noise_multiplier)
    spread = 1 / mechanism.coefficients[0] if mechanism.coefficients else 1.0  # of a first row
    assert released.deviations == pytest.approx(tuple(spread * unit * scale for scale in scales), rel=1e-12)


def _noisy(mechanism: Mechanism, batch: list[PairGradients], seed: int) -> list[torch.Tensor]:
    knobs = mechanism.knobs()
    if mechanism.coefficients and mechanism.noise.correlated is not None:
        exact, scales = sums(mechanism, batch), mechanism.scales(knobs)
        return mechanism.noise.correlated.add_row(exact, scales, knobs.noise_multiplier, FixedSeed(seed), 0)[0]
    noise = Gaussian(1.0) if mechanism.noise.family == "gaussian" else mechanism.noise
    return noise.add(sums(mechanism, batch), mechanism.scales(knobs), knobs.noise_multiplier, FixedSeed(seed))


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("pairs", [3, 24])
def test_rldp_as_published_moves_by_the_root_of_its_pairs_where_it_claims_one(pairs: int, steps: int) -> None:
    """Its accountant is given sigma, as if a unit moved the release by 1 in units of sigma C_i."""
    sizes = (2,) * pairs
    mechanism = started("rldp_published", sizes, interval=1, warmup=2, rounds=1, batch_size=2)
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        batch = batch_of(rng.standard_normal((4, 2 * pairs)), rng.standard_normal(4), sizes)
        mechanism.controller.observe(observed(privatised(mechanism, [batch], step, sizes), step))
    knobs = mechanism.knobs()
    if steps:
        assert len(set(knobs.radii)) > 1
    saturating = batch_of(np.full((1, 2 * pairs), 1e9), sizes=sizes)
    blocks = mechanism.exact_sums([saturating], zeros(sizes), knobs)
    scaled = [block / scale for block, scale in zip(blocks, mechanism.scales(knobs), strict=True)]
    moved_by = float(torch.cat(scaled).norm())
    release = mechanism.release(knobs, RATE)
    assert mechanism.scales(knobs) == pytest.approx(knobs.radii, rel=1e-12)
    assert release.noise_multiplier == knobs.noise_multiplier, "what its accountant is given is sigma itself"
    assert moved_by == pytest.approx(math.sqrt(pairs), rel=1e-6)
    assert moved_by > 1
    assert moved_by <= release.sensitivity * (1 + 1e-6)
    assert release.leaks


@pytest.mark.parametrize("size", [10.0, 1e6])
def test_the_raw_quantile_lets_one_unit_move_a_release_as_far_as_it_likes(size: float) -> None:
    """The unit drags the radius along, and with it all others; measured against the noise that hid it before."""
    mechanism = started("autoclip_published")
    rows = np.full((2, COORDINATES), 1.0)
    rows[0] *= 1e-3
    without, whole = batch_of(rows), batch_of(np.vstack([rows, [[size] * COORDINATES]]))
    before, after = privatised(mechanism, [without]).knobs, privatised(mechanism, [whole]).knobs
    assert after.radii[0] > 1.9 * before.radii[0]
    scales = mechanism.scales(before)
    blocks = zip(
        mechanism.exact_sums([without], zeros(), before),
        mechanism.exact_sums([whole], zeros(), after),
        scales,
        strict=True,
    )
    moved_by = float(torch.cat([(a - b) / scale for a, b, scale in blocks]).norm())
    declared = mechanism.release(mechanism.knobs(), RATE)
    assert declared.sensitivity == 1
    assert moved_by > 2
    assert declared.leaks
