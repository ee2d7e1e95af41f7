"""The weights: feasible whatever the distributions, as large as they may be, and the same one by one or together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from dptune.prediction import mixture
from dptune.prediction.mixture import moment_weights, pointwise_weights, renyi_weights

LOGITS = st.lists(st.floats(-400, 400), min_size=2, max_size=6)


def _excess(public: torch.Tensor, private: torch.Tensor, weight: float, order: float, share: float) -> float:
    """Both directions, by plain arithmetic on probabilities."""
    p = public.double().exp().numpy()
    moved = p + share * weight * (private.double().exp().numpy() - p)
    with np.errstate(all="ignore"):
        forward, backward = p * ((moved / p) ** order - 1), p * ((moved / p) ** (1 - order) - 1)
    return float(max(np.nansum(forward), np.nansum(backward)))


@given(LOGITS, LOGITS, st.sampled_from([1.5, 2.0, 3.0, 7.0]), st.floats(1e-5, 20), st.floats(0.01, 1.0))
@example([-129.0, 377.0], [1.0, 0.0], 3.0, 1.0, 1.0)
@settings(max_examples=300, deadline=None)
def test_weights_are_feasible_and_nothing_much_larger_is(
    first: list[float], second: list[float], order: float, excess: float, share: float
) -> None:
    size = min(len(first), len(second))
    public, private = (torch.log_softmax(torch.tensor(x[:size], dtype=torch.float64), -1) for x in (first, second))
    weight = float(renyi_weights(public[None], private[None, None], order, excess, share))
    assert 0 <= weight <= 1
    hidden = bool(((public < -600) & (private > -700)).any())
    if not hidden:
        assert _excess(public, private, weight, order, share) <= excess * (1 + 1e-6) + 1e-13
    likely = bool((public > -230).all())  # else the rounds may end at a smaller weight, which is safe
    if 0 < weight < 1 and likely and excess > 1e-3:
        assert _excess(public, private, min(1, weight * 1.001), order, share) > excess * 0.999


def test_a_scalar_root_finder_finds_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    public = torch.log_softmax(3 * torch.randn(4, 300, generator=generator, dtype=torch.float64), -1)
    shifts = 10 ** torch.linspace(-2, 1, 5, dtype=torch.float64)[:, None, None]
    noise = torch.randn(5, 4, 300, generator=generator, dtype=torch.float64)
    private = torch.log_softmax(public + shifts * noise, -1)

    def over(weight: float, model: int, place: int, excess: float) -> float:
        return _excess(public[place], private[model, place], weight, 3.0, 0.7) - excess

    for excess in (0.03, 5.0):
        together = renyi_weights(public, private, 3.0, excess, 0.7)
        for model in range(5):
            for place in range(4):
                here = model, place, excess
                alone = brentq(over, 0, 1, args=here, xtol=1e-14) if over(1.0, *here) > 0 else 1.0
                assert float(together[model, place]) == pytest.approx(alone, rel=2e-6)
                assert float(together[model, place]) <= alone * (1 + 1e-12)


def test_moments_find_the_largest_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    public = torch.log_softmax(torch.randn(50, generator=generator, dtype=torch.float64), -1)
    private = torch.log_softmax(public + 2 * torch.randn(50, generator=generator, dtype=torch.float64), -1)
    share, excess, order = 0.1, 1e-3, 4
    p, q = public.exp().numpy(), private.exp().numpy()
    moments = {k: float((np.abs(q - p) ** k / p ** (k - 1)).sum()) for k in range(2, order + 1)}

    def total(weight: float) -> float:
        terms = [math.comb(order, k) * (1 - share) ** (1 - k) * (2 * share * weight) ** k * moments[k] for k in moments]
        return sum(terms)

    alone = brentq(lambda weight: total(weight) - excess, 0, 1, xtol=1e-14)
    found = float(moment_weights(public[None], private[None, None], order, excess, share))
    assert alone * (1 - 2e-6) < found <= alone


def _pair(public: list[float], private: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(public))[None], torch.from_numpy(np.log(private))[None, None]


@pytest.mark.parametrize("weigh", [renyi_weights, moment_weights])
def test_a_token_that_only_private_models_say_gets_no_weight(weigh: Any) -> None:
    assert float(weigh(*_pair([0.5, 0.5, 0.0], [0.4, 0.4, 0.2]), 3, 0.1, 0.5)) == 0
    public, private = _pair([0.5, 0.5, 1e-305], [0.4, 0.4, 0.2])
    assert float(weigh(public, private, 3, 0.1, 0.5)) == 0


@pytest.mark.parametrize("weigh", [renyi_weights, moment_weights])
def test_a_token_that_private_models_never_say_is_no_obstacle_under_a_floor(weigh: Any) -> None:
    found = float(weigh(*_pair([0.98, 0.02], [1.0, 0.0]), 3, 0.5, 0.5))
    assert found > 0.5
    # Without a floor the token would betray its absence.
    assert 0 < float(renyi_weights(*_pair([0.98, 0.02], [1.0, 0.0]), 3, 0.5, 1.0)) < 1


@pytest.mark.parametrize("weigh", [renyi_weights, moment_weights])
def test_a_token_that_nobody_says_changes_nothing(weigh: Any) -> None:
    with_it = float(weigh(*_pair([0.7, 0.3, 0.0], [0.2, 0.8, 0.0]), 3, 0.1, 0.5))
    assert with_it == float(weigh(*_pair([0.7, 0.3], [0.2, 0.8]), 3, 0.1, 0.5))


@pytest.mark.parametrize("weigh", [renyi_weights, moment_weights])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_cannot_be_evaluated_gets_no_weight(weigh: Any, value: float) -> None:
    public, private = _pair([0.5, 0.5], [0.4, 0.6])
    broken = private.clone()
    broken[0, 0, 1] = value
    assert float(weigh(public, broken, 3, 0.1, 0.5)) == 0
    assert float(weigh(torch.full_like(public, math.nan), private, 3, 0.1, 0.5)) == 0


@pytest.mark.parametrize("weigh", [renyi_weights, moment_weights])
def test_equal_and_nearly_equal_models_keep_all_weight(weigh: Any) -> None:
    public = torch.log_softmax(torch.randn(1, 1000, dtype=torch.float64), -1)
    private = torch.stack([public, public + 1e-9 * torch.randn(1, 1000, dtype=torch.float64)])
    assert weigh(public, private, 3, 1e-4, 0.05).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("weigh", [renyi_weights, moment_weights])
def test_pieces_of_a_large_vocabulary_give_what_the_whole_gives(weigh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(2)
    public = torch.log_softmax(3 * torch.randn(6, 50_257, generator=generator), -1)
    private = torch.log_softmax(public + 2 * torch.randn(2, 6, 50_257, generator=generator), -1)
    monkeypatch.setattr(mixture, "_MOST_ON_CPU", 12 * 50_257)
    whole = weigh(public, private, 3, 0.03, 0.05)
    assert whole.dtype == torch.float64
    assert 0 < float(whole.min()) < float(whole.max()) < 1
    monkeypatch.setattr(mixture, "_MOST_ON_CPU", 5 * 50_257)
    assert torch.allclose(weigh(public, private, 3, 0.03, 0.05), whole, rtol=2e-6)


def test_each_position_may_have_a_limit_of_its_own() -> None:
    public, private = _pair([0.9, 0.1], [0.1, 0.9])
    public, private = public.expand(3, -1), private.expand(1, 3, -1)
    limits = torch.tensor([0.01, 0.1, 1e9], dtype=torch.float64)
    weights = renyi_weights(public, private, 3, limits, 1.0)[0]
    assert weights[0] < weights[1] < weights[2] == 1


def test_vocabularies_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        renyi_weights(torch.zeros(1, 5), torch.zeros(2, 1, 6), 3, 0.1)


@pytest.mark.parametrize("radius", [1e-18, 1e-14, 1e-3, 2.0, 30.0])
def test_pointwise_weights_are_shares_at_every_radius(radius: float) -> None:
    """A radius below the margin for rounding leaves no weight: never a negative one, however alike the models are."""
    public = torch.tensor([0.5, 0.5 - 1e-9, 1e-9, 0.0], dtype=torch.float64).log()
    laws = [[0.5, 0.5 - 1e-9, 1e-9, 0], [0.6, 0.4, 0, 0], [0, 0, 1, 0], [0.5, 0.4, 0, 0.1], [math.nan, 1, 0, 0]]
    private = torch.tensor(laws, dtype=torch.float64).log()
    weights = pointwise_weights(public, private, radius)
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert weights[3:].tolist() == [0, 0], "a token that only the private model says, and no law"
    assert float(weights[0]) == (radius > 1e-14)
    mixed = torch.log1p(weights[:3, None] * (private[:3].exp() / public.exp() - 1))[:, :3]
    assert mixed.abs().max() <= radius * (1 + 1e-12)
