"""Maximisers: their separation by its formula, one text at a time, and what decides which samples they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from audit_models import gpt2, tokenizer

from dptune.audit.text.likelihood import sampled_texts
from dptune.audit.text.maximisers import adapter_gradients, maximisers, separations
from dptune.training.data import tokenize

PUBLIC = ["The patient has diabetes.", "The patient is well.", "Takes insulin twice a day."]
KEPT, CHOICE, TOKENS = 10, 4, 12


def chosen(seed: int = 0) -> list[str]:
    return maximisers(gpt2(), tokenizer(), KEPT, PUBLIC, choice=CHOICE, tokens=TOKENS, seed=seed)


def test_a_separation_is_the_distance_of_two_worlds_in_noise_of_all_others() -> None:
    """Each canary's own coin adds no noise, so that the noise beside each is built anew."""
    chance = np.random.default_rng(0)
    canaries, others = chance.normal(size=(6, 9)).astype(np.float32), chance.normal(size=(3, 9)).astype(np.float32)
    own, known = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (canaries, others))
    for place, found in enumerate(separations(canaries * 100, others)):
        beside = np.delete(own, place, axis=0)
        noise = np.eye(9) / 0.92**2 + beside.T @ beside / 4 + known.T @ known
        assert found == pytest.approx(np.sqrt(own[place] @ np.linalg.solve(noise, own[place])), rel=1e-5)


def test_texts_are_those_samples_that_are_told_apart_best() -> None:
    model, texts = gpt2(), sampled_texts(gpt2(), tokenizer(), CHOICE * KEPT, tokens=TOKENS)
    rows = [tokenize(several, tokenizer(), TOKENS + 2) for several in (texts, PUBLIC)]
    gradients = [adapter_gradients(model, several) for several in rows]
    best = np.argsort(-separations(*gradients))[:KEPT]
    assert chosen() == [texts[place] for place in sorted(best)]


def test_a_public_seed_decides_them_and_the_model_stays_as_it_was() -> None:
    model = gpt2()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    again = maximisers(model, tokenizer(), KEPT, PUBLIC, choice=CHOICE, tokens=TOKENS)
    assert again == chosen()
    assert len(set(again)) == KEPT
    assert again != chosen(seed=1)
    after = model.state_dict()
    assert list(after) == list(before), "no adapter is left"
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
