"""The raw quantile of RLDP's "AutoClip": P3.1 of the specification. It may run, never with a guarantee."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from mechanism_steps import RATE, batch_of, observed, privatised, started

from dptune.core.errors import ConfigError
from dptune.mechanisms.planning import Schedule, calibrated, price
from dptune.mechanisms.registry import build
from dptune.privacy.accountants import epsilons

torch.set_num_threads(1)

SCHEDULE = Schedule(RATE, 50, 1e-5)


def test_p31_no_noise_gives_it_a_certified_epsilon() -> None:
    for noise in (0.5, 1e6):
        mechanism = started("autoclip_published", noise_multiplier=noise)
        found = epsilons(Counter({mechanism.release(mechanism.knobs(), RATE): 1}), 1e-5)
        assert math.isinf(found.certified)
        assert math.isfinite(found.noise_only)
        assert found.leaks == ("raw quantile of the batch's gradient norms",)


def test_p31_it_is_refused_where_a_guarantee_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="raw quantile") as caught:
        calibrated(lambda noise: build("autoclip_published", {"noise_multiplier": noise}), 2.0, SCHEDULE, "certified")
    assert caught.value.field == "accounting"


def test_on_its_papers_terms_it_costs_what_static_costs() -> None:
    """The paper charges nothing for the quantile."""
    leaky, static = (price(started(name), SCHEDULE) for name in ("autoclip_published", "static"))
    assert (leaky.published, leaky.noise_only) == (static.published, static.noise_only)
    assert math.isfinite(static.certified)


@pytest.mark.parametrize("rows", [[], [[0.0] * 8] * 3])
def test_without_gradients_the_given_radius_holds_whatever_came_before(rows: list[list[float]]) -> None:
    """What came before is in no checkpoint."""
    mechanism = started("autoclip_published", max_grad_norm=0.3)
    for before in ([], [batch_of([[5.0] * 8])]):
        privatised(mechanism, before)
        assert privatised(mechanism, [batch_of(rows)] if rows else []).knobs.radii == (0.3,)


def test_the_knobs_that_are_charged_do_not_show_the_leak_so_the_release_must_name_it() -> None:
    mechanism = started("autoclip_published")
    released = privatised(mechanism, [batch_of([[5.0] * 8])])
    mechanism.controller.observe(observed(released))
    assert mechanism.knobs().radii == (1.0,) != released.knobs.radii
    assert mechanism.release(mechanism.knobs(), RATE).leaks == mechanism.controller.raw_inputs != ()


def test_one_unit_scales_what_all_others_contribute() -> None:
    """P0.3 does not hold: with a large third unit the others pass unclipped."""
    mechanism = started("autoclip_published")
    small, large = [[0.1] * 8, [1.0] * 8], [[100.0] * 8]
    alone = privatised(mechanism, [batch_of(small)]).knobs.radii[0]
    joined = privatised(mechanism, [batch_of(small + large)]).knobs.radii[0]
    assert alone == pytest.approx(0.55 * math.sqrt(8), rel=1e-6)
    assert joined == pytest.approx(1.0 * math.sqrt(8), rel=1e-6)


@pytest.mark.parametrize("clipper", ["per_pair", "transformed", "none"])
def test_it_needs_one_radius(clipper: str) -> None:
    with pytest.raises(ConfigError, match="controller raw_quantile"):
        started("autoclip_published", clipper=clipper)


@pytest.mark.parametrize("bad", [0, 1, -0.5, 2, "nan", "inf", "half", None])
def test_bad_target_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="target") as caught:
        started("autoclip_published", target=bad)
    assert caught.value.field == "target"
