"""The fixed mixture's certificate, by brute force over random and adversarial laws, with the shipped solver."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dptune.core.errors import ConfigError
from dptune.prediction.mixture import Slots, law, moment_weights, renyi_weights
from dptune.prediction.protocols import FixedMixture, planned_answers, protocol_of
from dptune.privacy.accountants import epsilons, pld_epsilon, rdp_epsilon, smallest_epsilon
from dptune.privacy.release import Release

INSTANCES = 2500
#: Rounding of sums over the vocabulary, relative to an epsilon as small as 1e-4.
ROUNDING = 1e-7


@pytest.mark.parametrize(
    ("weight", "floor", "share", "radius"),
    [
        (0.0874457569, 0.0988526850, 0.1153932040, 0.0307308446),
        (0.2, 0.21, 0.0476190476, 0.0147013729),
        (0.3, 0.30875, 0.0283400810, 0.0100461647),
    ],
)
def test_the_constants_of_the_spec(weight: float, floor: float, share: float, radius: float) -> None:
    protocol = FixedMixture(public_weight=weight)
    assert protocol.slots.floor == pytest.approx(floor, abs=1e-10)
    assert protocol.slots.share == pytest.approx(share, abs=1e-10)
    assert protocol.figures["radius"] == pytest.approx(radius, abs=1e-10)


def _renyi(p: torch.Tensor, q: torch.Tensor, order: float) -> torch.Tensor:
    """(instances,): largest of both directions; exact zeros of p and q together count nothing."""
    both = (p > 0) | (q > 0)
    ratio = torch.where(both, p.log() - q.log(), 0.0)
    forward = torch.where(both, p * torch.expm1((order - 1) * ratio), 0.0).sum(-1)
    backward = torch.where(both, q * torch.expm1((1 - order) * ratio), 0.0).sum(-1)
    return torch.log1p(torch.maximum(forward, backward)) / (order - 1)


def _logits(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Random and adversarial: logit scales up to 20, and tokens as rare as 1e-14."""
    scale = 20 ** rng.uniform(-2, 1, (shape[0], *[1] * (len(shape) - 1)))
    logits = scale * rng.standard_normal(shape)
    rare = rng.random(shape) < 0.2
    logits -= rare * rng.uniform(0, 32, shape) * (rng.random((shape[0], *[1] * (len(shape) - 1))) < 0.5)
    return torch.log_softmax(torch.from_numpy(logits), -1)


CASES = [(order, slots) for order in (2, 3, 5, 7) for slots in (1, 2, 8, 80)] + [(1.1, 3), (2.5, 1), (3.5, 8), (9, 2)]


@pytest.mark.parametrize(("order", "models"), CASES)
@pytest.mark.parametrize("public_weight", [1e-4, 0.2])
def test_a_shard_more_or_less_never_shows_beyond_its_certificate(
    order: float, models: int, public_weight: float
) -> None:
    """100,000 instances over all cases: the whole law against the one where slot 0 holds p0, both directions."""
    rng = np.random.default_rng(models)
    epsilon = 10 ** rng.uniform(-4, 0)
    slots, vocabulary = Slots(models, public_weight), int(rng.integers(2, 7))
    public = _logits(rng, INSTANCES, vocabulary)
    # Slots beyond the first four hold p0, as ``law`` takes those that it is not given.
    private = torch.stack([_logits(rng, INSTANCES, vocabulary) for _ in range(min(models, 4))])
    weights = renyi_weights(public, private, order, slots.excess(epsilon, order), slots.share)
    without = private.clone()
    without[0] = public
    one, other = (law(public, each, weights, slots) for each in (private, without))
    assert float(_renyi(one, other, order).max()) <= epsilon * (1 + ROUNDING)
    assert float(weights.max()) > 0


@pytest.mark.parametrize(("order", "models"), [(order, models) for order in (2, 3, 5) for models in (1, 2, 8, 80)])
@pytest.mark.parametrize("public_weight", [1e-2, 0.2])
def test_a_record_more_or_less_never_shows_beyond_its_certificate(
    order: int, models: int, public_weight: float
) -> None:
    """60,000 instances: slot 0's model becomes any other, with the weight that the other gets."""
    rng = np.random.default_rng(7 * models + order)
    epsilon = 10 ** rng.uniform(-4, 0)
    slots, vocabulary = Slots(models, public_weight), int(rng.integers(2, 7))
    public = _logits(rng, INSTANCES, vocabulary)
    laws = []
    for each in (_logits(rng, INSTANCES, vocabulary)[None] for _ in range(2)):
        weights = moment_weights(public, each, order, slots.excess(epsilon, order), slots.share)
        laws.append(law(public, each, weights, slots))
    worst = _renyi(*laws, order)
    assert float(worst.max()) <= epsilon * (1 + ROUNDING)


def test_the_certificates_are_reached() -> None:
    """They are no larger than they need be: one slot under a large public weight, two tokens."""
    slots, epsilon, order = Slots(1, 0.99), 1e-5, 3
    excess, share = slots.excess(epsilon, order), slots.share
    public = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    up, down = torch.tensor([[[[1 - 1e-9, 1e-9]]], [[[1e-9, 1 - 1e-9]]]], dtype=torch.float64).log()

    def worst(weigh: Any, one: torch.Tensor, other: torch.Tensor) -> float:
        laws = (law(public, each, weigh(public, each, order, excess, share), slots) for each in (one, other))
        return float(_renyi(*laws, order)) / epsilon

    assert 0.99 < worst(renyi_weights, up, public[None]) <= 1
    assert 0.95 < worst(moment_weights, up, down) <= 1
    # What is calibrated for removal alone costs nearly four times as much when a model is replaced.
    assert 3.5 < worst(renyi_weights, up, down) < 4.5


def test_slots_that_are_taken_away_are_not_covered() -> None:
    """Spec: renormalising over N - 1 models costs 50 times as much here; why slots stay and N tells nothing."""
    slots, order, epsilon, rare = Slots(16, 0.01), 3, 3.1233481640e-3, 1.05e-3
    public = torch.tensor([[rare, 1 - rare]], dtype=torch.float64).log()
    first, others = torch.tensor([[[[0.99, 0.01]]], [[[1e-11, 1 - 1e-11]]]], dtype=torch.float64).log()
    private = torch.cat([first, others.expand(15, -1, -1)])
    weights = renyi_weights(public, private, order, slots.excess(epsilon, order), slots.share)
    whole = law(public, private, weights, slots)
    renormalised = law(public, private[1:], weights[1:], Slots(15, 0.01))
    assert float(_renyi(whole, renormalised, order)) > 40 * epsilon


@given(st.floats(1.05, 10), st.integers(1, 500), st.floats(1e-6, 0.999), st.floats(1e-9, 3))
@settings(max_examples=200, deadline=None)
def test_constants_belong_together(order: float, models: int, weight: float, epsilon: float) -> None:
    slots = Slots(models, weight)
    assert 0 < slots.share < 1
    assert weight < slots.floor <= 1
    assert slots.share * slots.floor * models == pytest.approx(1 - weight)
    # The bound, forwards: (1 - s) + s e^((a-1) r*) = e^((a-1) e).
    whole = math.log1p(slots.floor * math.expm1((order - 1) * slots.radius(epsilon, order)))
    assert whole == pytest.approx((order - 1) * epsilon, rel=1e-9)


@given(st.floats(0.5, 50), st.floats(1.5, 12), st.integers(1, 100_000), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_all_tokens_together_keep_the_budget_and_one_more_does_not(
    epsilon: float, alpha: float, tokens: int, models: int
) -> None:
    try:
        protocol = FixedMixture(epsilon=epsilon, alpha=alpha, tokens=tokens, models=models)
    except ConfigError:
        return  # too small for one token
    planned = planned_answers(protocol)
    prices = epsilons(planned, 1e-5, published_accountant="pmixed")
    assert prices.certified <= epsilon
    assert prices.certified == pytest.approx(epsilon, rel=1e-9)
    assert not prices.leaks
    planned[protocol.release] += 1
    assert smallest_epsilon(planned, 1e-5) > epsilon


def test_no_accountant_of_gaussians_prices_a_token() -> None:
    """A token is bounded at one order only; the Gaussian of equal bound would be cheaper."""
    planned = planned_answers(FixedMixture())
    assert pld_epsilon(planned, 1e-5) == math.inf
    assert rdp_epsilon(planned, 1e-5) == math.inf
    mixed = planned + planned_answers(FixedMixture(alpha=5.0))
    assert smallest_epsilon(mixed, 1e-5) > 8
    mixed[Release(0.01, 1.0)] += 10
    assert math.isfinite(smallest_epsilon(mixed, 1e-5))
    mixed[Release(0.01, 0.0, noise="none")] += 1
    assert smallest_epsilon(mixed, 1e-5) == math.inf


@pytest.mark.parametrize(
    "change",
    [
        {"renyi": None},
        {"noise": "gaussian"},
        {"noise_multiplier": 5.0},
        {"sensitivity": 2.0},
        {"renyi": [3.0]},
        {"renyi": [1.0, 0.1]},
        {"renyi": [3.0, "x"]},
        {"sample_rate": 0.5},
    ],
    ids=str,
)
def test_a_token_in_a_ledger_is_whole(change: dict[str, Any]) -> None:
    written = FixedMixture().release.to_dict()
    assert Release.from_dict(written) == FixedMixture().release
    with pytest.raises(ConfigError):
        Release.from_dict(written | change)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"public_weight": 0}, "public_weight"),
        ({"public_weight": 1}, "public_weight"),
        ({"unit": "record", "alpha": 2.5}, "alpha"),
        ({"unit": "tenant"}, "unit"),
        ({"alpha": 1}, "alpha"),
        ({"tokens": 0}, "tokens"),
        ({"models": 0}, "models"),
        ({"epsilon": 1}, "too small for one token"),
        ({"subsample": 0.03}, "subsample"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        protocol_of("pmixed", options)


def test_the_least_epsilon_that_a_refusal_names_is_enough() -> None:
    """Rounded to the nearest, every other one would be refused in its turn."""
    for delta in (1e-3, 1e-4, 1e-5, 1e-6, 3e-7):
        with pytest.raises(ConfigError) as refused:
            protocol_of("pmixed", {"epsilon": 0.1, "alpha": 3.0, "delta": delta})
        least = float(refused.value.fix.split()[3].rstrip(","))
        enough = protocol_of("pmixed", {"epsilon": least * (1 + 1e-9), "alpha": 3.0, "delta": delta})
        assert enough.rdp_budget > 0
