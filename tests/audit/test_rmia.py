"""RMIA against the paper's formula, written down a second time with one text and one model after another."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dptune.audit.text.membership import rmia

Losses = NDArray[np.float64]


def rmia_of_the_paper(
    x: float,
    of_models: list[float],
    trained: list[bool] | None,
    population: list[tuple[float, list[float]]],
    gamma: float,
    a: float = 0.3,
) -> float:
    """The share of texts z with (p(x) / P(x)) / (p(z) / P(z)) >= gamma; z are in the training data of no model.

    P offline is that of the authors' program with its coefficient a; online P is the mean of the means over models
    with the text and without.
    """

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    def offline(losses: list[float]) -> float:
        return 0.5 * ((1 + a) * mean([math.exp(-one) for one in losses]) + (1 - a))

    if trained is None:
        expected = offline(of_models)
    else:
        inside = [math.exp(-one) for one, coin in zip(of_models, trained, strict=True) if coin]
        outside = [math.exp(-one) for one, coin in zip(of_models, trained, strict=True) if not coin]
        expected = 0.5 * (mean(inside) + mean(outside))
    ratio = math.exp(-x) / expected
    beaten = [ratio / (math.exp(-z) / offline(losses)) >= gamma for z, losses in population]
    return mean([float(one) for one in beaten])


def scene(seed: int, texts: int, models: int) -> tuple[Losses, Losses]:
    """Mean losses under the attacked model and under reference models."""
    chance = np.random.default_rng(seed)
    levels = chance.gamma(4, 0.5, size=texts)
    return levels + chance.normal(0, 0.2, texts), levels + chance.normal(0, 0.2, (models, texts))


@pytest.mark.parametrize("gamma", [1.0, 2.0])
@pytest.mark.parametrize("online", [False, True])
def test_it_ranks_texts_as_the_papers_score_does_but_for_ties(gamma: float, online: bool) -> None:
    losses, references = scene(1, 60, 4)
    coins = np.stack([np.random.default_rng(row).permutation(4) < 2 for row in range(60)], axis=1) if online else None
    ours = rmia(losses, references, coins)
    z, of_z = scene(2, 500, 4)
    population = list(zip(z.tolist(), of_z.T.tolist(), strict=True))
    theirs = [
        rmia_of_the_paper(
            float(losses[one]),
            references[:, one].tolist(),
            None if coins is None else coins[:, one].tolist(),
            population,
            gamma,
        )
        for one in range(60)
    ]
    by_ours = np.array(theirs)[np.argsort(ours)]
    assert (np.diff(by_ours) >= 0).all()
    assert len(set(theirs)) > 10, "the population tells texts apart, so that the order means something"


def test_the_public_model_alone_ranks_otherwise_than_a_difference_of_losses() -> None:
    losses, references = scene(3, 200, 1)
    ours, calibrated = np.argsort(rmia(losses, references)), np.argsort(references[0] - losses)
    assert (ours != calibrated).any()


def test_models_that_were_trained_on_half_of_the_texts_find_members_best() -> None:
    chance = np.random.default_rng(4)
    level = chance.gamma(6, 0.5, size=2000)
    coins = np.stack([chance.permutation(9) < 4 for _ in range(2000)], axis=1)
    every = level - 0.3 * coins + chance.normal(0, 0.3, (9, 2000))
    members, references, included = coins[0], every[1:], coins[1:]
    whole = included.any(axis=0) & (~included).any(axis=0)
    online = rmia(every[0], references, included)[whole]
    offline = rmia(every[0], references[:1] + 0.15)[whole]
    wins = [np.mean(score[members[whole]][:, None] > score[~members[whole]][None]) for score in (online, offline)]
    assert wins[0] > 0.7 > 0.65 > wins[1] > 0.5
