"""What each unit of privacy is promised, by the weights that answers take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dptune.prediction.mixture import law
from dptune.prediction.predictor import weights_of
from dptune.prediction.protocols import FixedMixture

ROUNDING = 1e-7
INSTANCES = 4000
UP, DOWN = ([1 - 1e-9, 1e-9], [1e-9, 1 - 1e-9])


def logs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def worst(protocol: FixedMixture, public: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest Renyi divergence between what is answered from ``one`` and from ``other``, over what is certified."""
    p, q = (law(public, each, weights_of(protocol, public, each), protocol.slots) for each in (one[None], other[None]))
    order = protocol.alpha
    divergences = [torch.log((a**order * b ** (1 - order)).sum(-1)) / (order - 1) for a, b in ((p, q), (q, p))]
    return float(torch.stack(divergences).max()) / protocol.rdp_per_token


def small(unit: Any) -> FixedMixture:
    """One slot under a large public weight, where a bound has the least to spare."""
    return FixedMixture(unit=unit, models=1, public_weight=0.99, tokens=100_000)


def test_a_shard_that_goes_away_uses_what_it_is_promised() -> None:
    assert 0.98 < worst(small("shard"), logs([0.5, 0.5]), logs(UP), logs([0.5, 0.5])) <= 1 + ROUNDING


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_a_unit_that_turns_its_model_around_stays_within_what_it_is_promised(unit: Any) -> None:
    assert 0.9 < worst(small(unit), logs([0.5, 0.5]), logs(UP), logs(DOWN)) <= 1 + ROUNDING


def test_what_a_shard_is_promised_would_not_do_for_them() -> None:
    """The two bounds differ, so that the test above fails where one is taken for the other."""
    assert worst(small("shard"), logs([0.5, 0.5]), logs(UP), logs(DOWN)) > 3


@pytest.mark.parametrize("unit", ["shard", "record", "patient"])
@pytest.mark.parametrize("models", [1, 8])
def test_no_pair_of_models_shows_more_than_the_unit_is_promised(unit: Any, models: int) -> None:
    """Random laws of five tokens: any other model for a record or patient, the public one for a shard."""
    rng = np.random.default_rng(models)

    def laws() -> torch.Tensor:
        scale = 10 ** rng.uniform(-2, 1, (INSTANCES, 1))
        return torch.log_softmax(torch.from_numpy(scale * rng.standard_normal((INSTANCES, 5))), -1)

    public, one = laws(), laws()
    protocol = FixedMixture(unit=unit, models=models, tokens=2048)
    assert 0.1 < worst(protocol, public, one, public if unit == "shard" else laws()) <= 1 + ROUNDING
