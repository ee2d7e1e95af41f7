"""Samples of a public model: distinct, printable, of the asked length, and more varied at a higher temperature."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from audit_models import memorised, tokenizer

from dptune.audit.text.likelihood import canary_passage, sampled_texts
from tasks.audit.attacks import _uncut


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


def test_a_canary_that_is_all_sample_is_attacked_though_training_cut_it() -> None:
    """A code at a text's end is lost where the text is cut; of a sample, training saw the beginning."""
    long = "The patient takes insulin twice a day. " * 4
    target: Any = SimpleNamespace(
        cell=SimpleNamespace(training=SimpleNamespace(max_length=12)),
        tokenizer=tokenizer(),
        passage=lambda *one: canary_passage(one[0], one[1], "text", tokenizer(), one[2]),
    )
    canaries = [("", long, "samples"), (long, "K7Q2ZB90XM", "code"), ("", "day.", "samples")]
    assert _uncut(target, canaries) == [canaries[0], canaries[2]]
