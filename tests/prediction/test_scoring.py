"""Perplexities of a protocol: by hand, by enumeration of all samples, and both averages."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_ensemble import WIDTH, base, build, texts
from tiny_models import CPU

from dptune.prediction import predictor
from dptune.prediction.ensemble import load_adapters, read_manifest
from dptune.prediction.mixture import law, renyi_weights
from dptune.prediction.predictor import (
    RecordScore,
    next_log_probabilities,
    score_model,
    score_records,
    summed_up,
    weights_of,
)
from dptune.prediction.protocols import FixedMixture, Published
from dptune.training.data import tokenize, with_context
from dptune.training.gradients.stacked_adapters import PUBLIC
from dptune.training.models.model import load_base, load_tokenizer


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder: Path = build(tmp_path_factory.mktemp("ensembles") / "whole")
    model = load_base(base(), CPU).eval()
    tokens = tokenize(texts(3, 9, ("zebra", "cat", "old")), load_tokenizer(base()), WIDTH)
    return model, load_adapters(folder, read_manifest(folder), model, CPU), tokens


def score_ensemble(model, adapters, tokens, protocols, seed: int) -> tuple:  # type: ignore[no-untyped-def]
    """All records in one process."""
    found = score_records(model, adapters, tokens, protocols, seed, range(len(tokens.rows)))
    return summed_up([score for _, score in found])


def test_both_averages_are_what_they_say() -> None:
    scores = [
        RecordScore(2, {"law": 4.0}, {"law": 5.0}, {"law": 1.0}, 3.0),
        RecordScore(1, {"law": 0.5}, {"law": 1.0}, {"law": 0.5}, 0.5),
    ]
    found, average = summed_up(scores)
    assert found["law"]["perplexity_per_block"] == pytest.approx((math.exp(2) + math.exp(0.5)) / 2)
    assert found["law"]["perplexity_pooled"] == pytest.approx(math.exp(4.5 / 3))
    assert found["law"]["sampled_perplexity_pooled"] == pytest.approx(math.exp(2))
    assert found["law"]["private_weight"] == pytest.approx(0.5)
    assert average["perplexity_pooled"] == pytest.approx(math.exp(3.5 / 3))


def test_records_score_the_same_in_any_process(scored: tuple) -> None:
    """Parts of any size and order, the published protocol's drawn samples too."""
    model, adapters, tokens = scored
    protocols = {
        "mine": FixedMixture(tokens=8, models=3, unit="record"),
        "published": Published(tokens=2, models=3, subsample=0.4),
    }
    count = len(tokens.rows)
    whole = dict(score_records(model, adapters, tokens, protocols, 5, range(count)))
    parts = [
        dict(score_records(model, adapters, tokens, protocols, 5, chosen)) for chosen in ([2, 0], range(1, count, 2))
    ]
    assert all(score == whole[number] for part in parts for number, score in part.items())


def test_a_fixed_mixture_is_scored_by_its_law(scored: tuple) -> None:
    """Position by position, with the function that serving uses."""
    model, adapters, tokens = scored
    protocol = FixedMixture(tokens=8, models=3, unit="record")
    total = []
    for row in tokens.rows:
        for end in range(1, len(row)):
            laws = next_log_probabilities(model, adapters, row[:end].tolist(), [PUBLIC, 0, 1, 2])
            public, private = laws[:1], laws[1:, None]
            whole = law(public, private, weights_of(protocol, public, private), protocol.slots)
            total.append(-math.log(whole[0, row[end]]))
    found = score_ensemble(model, adapters, tokens, {"mine": protocol}, seed=0)[0]["mine"]
    assert found["perplexity_pooled"] == pytest.approx(math.exp(np.mean(total)), rel=1e-5)
    assert 0 < found["private_weight"] <= 0.8


def test_a_memorised_token_is_scored_on_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 1 cuts no law. The last token, whose public probability is below 2^-40, holds the weights down.

    Its share of a private law is 1e-4, so that the weights are next to 0, where cut laws would give them .8 and more.
    The fixed mixture has laws that are cut by its own definition, under which that token has no probability.
    """
    public = torch.tensor([[0.5, 0.3, 0.2 - 1e-13, 1e-13]] * 2, dtype=torch.float64).log()
    private = torch.tensor([0.2, 0.2, 0.6 - 1e-4, 1e-4], dtype=torch.float64).log().expand(80, 2, -1)
    records = [
        predictor._Record(public[:1], private[:, :1], torch.tensor([2])),
        predictor._Record(public, private, torch.tensor([2, 3])),
    ]
    monkeypatch.setattr(predictor, "_records", lambda *_: iter(records))
    given: tuple[Any, Any, Any] = (None, None, SimpleNamespace(rows=[0, 1]))
    protocols = {"published": Published(), "mine": FixedMixture()}
    (_, common), (_, both) = score_records(*given, protocols, 0, [0, 1])
    assert common.losses["published"] == pytest.approx(-math.log(0.2), abs=1e-3)
    assert common.private["published"] < 1e-3
    assert common.losses["mine"] < 1.0
    assert common.private["mine"] == pytest.approx(0.8)
    assert math.isfinite(both.losses["published"])
    assert math.isinf(both.losses["mine"])


@pytest.mark.parametrize("subsample", [0.3, 1.0])
def test_the_published_law_is_the_mean_over_all_samples(scored: tuple, subsample: float) -> None:
    """Spec, section 5.2, by enumeration."""
    model, adapters, tokens = scored
    protocol = Published(tokens=8, models=3, subsample=subsample)
    total = []
    for row in tokens.rows:
        for end in range(1, len(row)):
            laws = next_log_probabilities(model, adapters, row[:end].tolist(), [PUBLIC, 0, 1, 2])
            mean = 0.0
            for sample in itertools.product([False, True], repeat=3):
                chosen = np.flatnonzero(sample)
                chance = subsample ** len(chosen) * (1 - subsample) ** (3 - len(chosen))
                if not chance:
                    continue
                mixed = laws[0].exp()
                if len(chosen):
                    private = laws[1:][chosen, None]
                    excess = math.expm1(2 * protocol.radii[len(chosen) - 1])
                    weights = renyi_weights(laws[:1], private, 3.0, excess)[:, 0, None]
                    mixed = (laws[0].exp() + weights * (private[:, 0].exp() - laws[0].exp())).mean(0)
                mean += chance * float(mixed[row[end]])
            total.append(-math.log(mean))
    found = score_ensemble(model, adapters, tokens, {"published": protocol}, seed=0)[0]["published"]
    assert found["perplexity_pooled"] == pytest.approx(math.exp(np.mean(total)), rel=1e-5)
    if subsample == 1:
        assert found["sampled_perplexity_pooled"] == pytest.approx(found["perplexity_pooled"], rel=1e-9)


def test_one_sample_at_a_time_scores_above_the_law(scored: tuple) -> None:
    """Jensen: in expectation; here over 60 seeds' mean, whose standard error is far below the gap."""
    model, adapters, tokens = scored
    options = {"tokens": 2, "models": 3, "subsample": 0.4}
    protocols = {str(seed): Published(with_replacement=seed % 2 == 0, **options) for seed in range(60)}
    found, _ = score_ensemble(model, adapters, tokens, protocols, seed=1)
    sampled = np.mean([math.log(each["sampled_perplexity_pooled"]) for each in found.values()])
    assert sampled > math.log(found["0"]["perplexity_pooled"])


def test_what_private_models_know_shows(scored: tuple) -> None:
    """The more budget, the nearer to the average of the private models."""
    model, adapters, tokens = scored
    protocols = {f"{eps}": FixedMixture(epsilon=eps, tokens=64, models=3, public_weight=0.01) for eps in (5.0, 50.0)}
    found, average = score_ensemble(model, adapters, tokens, protocols, seed=0)
    order = [average, found["50.0"], found["5.0"], score_model(model, tokens)]
    values = [each["perplexity_pooled"] for each in order]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_prompts_are_read_and_not_scored(scored: tuple) -> None:
    """Of the model, of a protocol and of the average: each is the mean over the tokens that count."""
    model, adapters, tokens = scored
    protocol = {"mine": FixedMixture(tokens=8, models=3, unit="record")}
    prompts = replace(tokens, rows=[with_context(row, np.arange(len(row)) >= 3) for row in tokens.rows])
    heads = replace(tokens, rows=[row[:3] for row in tokens.rows])
    losses, counts = {}, {}
    for name, rows in (("tail", prompts), ("whole", tokens), ("head", heads)):
        found, average = score_ensemble(model, adapters, rows, protocol, seed=0)
        values = (score_model(model, rows), found["mine"], average)
        losses[name] = [math.log(value["perplexity_pooled"]) for value in values]
        counts[name] = sum(int((row[1:] >= 0).sum()) for row in rows.rows)
    assert counts["tail"] + counts["head"] == counts["whole"]
    for tail, head, whole in zip(losses["tail"], losses["head"], losses["whole"], strict=True):
        parts = tail * counts["tail"] + head * counts["head"]
        assert parts == pytest.approx(whole * counts["whole"], rel=1e-6)
