"""Samples of a public model: distinct, printable, of the asked length, and more varied at a higher temperature."""

from __future__ import annotations

from functools import cache

import torch
from audit_models import memorised, tokenizer

from dptune.audit.text.samples import sampled_texts


@cache
def texts(temperature: float = 1.5, seed: int = 0) -> tuple[str, ...]:
    return tuple(sampled_texts(memorised(), tokenizer(), 40, temperature=temperature, tokens=12, seed=seed))


def test_texts_are_distinct_and_can_be_stored() -> None:
    assert len(texts()) == len(set(texts())) == 40
    for text in texts():
        assert text == text.strip()
        assert text.isprintable()
        assert len(text) >= 8
        assert tokenizer().eos_token not in text


def test_a_seed_decides_them_and_leaves_other_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    again = tuple(sampled_texts(memorised(), tokenizer(), 40, tokens=12))
    assert again == texts()
    assert texts(seed=1) != texts()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_that_knows_one_text_gives_few_at_a_low_temperature() -> None:
    """It repeats what it learned by heart; nothing is made up to fill the number."""
    few = sampled_texts(memorised(), tokenizer(), 40, temperature=0.01, tokens=12)
    assert len(few) < 10
