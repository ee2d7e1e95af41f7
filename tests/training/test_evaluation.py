"""Perplexity against the definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, adapted, records, row_loss, with_prompts

from dptune.core.errors import ConfigError
from dptune.training.data import Tokens
from dptune.training.evaluation import perplexity, perplexity_in_groups


def test_perplexity_is_exp_of_the_mean_token_loss() -> None:
    model, tokens = adapted(randomised=True), records(7)
    counts = [len(row) - 1 for row in tokens.rows]
    with torch.no_grad():
        total = sum(float(row_loss(model, row)) * n for row, n in zip(tokens.rows, counts, strict=True))
    assert perplexity(model, tokens, 3) == pytest.approx(math.exp(total / sum(counts)), rel=1e-5)


def test_groups_add_up_to_the_perplexity_and_hold_neighbours() -> None:
    model, tokens = adapted(randomised=True), records(45)
    found, groups = perplexity_in_groups(model, tokens, 8)
    assert found == perplexity(model, tokens, 8)
    assert len(groups) == 4, "of 10 records at least"
    assert math.exp(sum(loss for loss, _ in groups) / sum(count for _, count in groups)) == pytest.approx(found)
    assert groups[0][1] == sum(len(row) - 1 for row in tokens.rows[:12])
    assert perplexity_in_groups(model, replace(tokens, rows=tokens.rows[:39]), 8)[1] == []


def test_perplexity_is_that_of_the_tokens_that_count() -> None:
    """One long prompt weighs nothing: the mean is over the tokens that count, not over records."""
    model, tokens = adapted(randomised=True), with_prompts(records(8))
    counts = [int((row[1:] >= 0).sum()) for row in tokens.rows]
    assert min(counts) == 0
    with torch.no_grad():
        total = sum(float(row_loss(model, row)) * n for row, n in zip(tokens.rows, counts, strict=True))
    for rows in (1, 3, 8):
        assert perplexity(model, tokens, rows) == pytest.approx(math.exp(total / sum(counts)), rel=1e-5)


def test_records_without_a_token_that_counts_have_no_perplexity() -> None:
    tokens = with_prompts(records(4))
    with pytest.raises(ConfigError, match=r"training\.max_length: leaves no token"):
        perplexity(adapted(), replace(tokens, rows=tokens.rows[3:]), 2)


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_perplexity_depends_neither_on_order_nor_on_padding(rows: int) -> None:
    model, tokens = adapted(randomised=True), records(7)
    reverse = Tokens(rows=tokens.rows[::-1], padding=50, width=30)
    assert perplexity(model, reverse, rows) == pytest.approx(perplexity(model, tokens, 4), rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_is_restored(training: bool) -> None:
    model, tokens = adapted(randomised=True, dropout=0.5).train(training), records(4)
    assert perplexity(model, tokens, 4) == perplexity(model, tokens, 4)
    assert model.training is training


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    model = adapted("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert perplexity(model, records(3), 2) == pytest.approx(VOCABULARY, rel=1e-6)


def test_single_tokens_do_not_count() -> None:
    model, tokens = adapted(), records(3)
    longer = Tokens(rows=[*tokens.rows, np.array([5], dtype=np.int32)], padding=0, width=tokens.width)
    assert perplexity(model, longer, 2) == pytest.approx(perplexity(model, tokens, 2), rel=1e-6)


def test_a_hopeless_model_has_an_infinite_perplexity() -> None:
    """A run that diverged must still be reported."""
    model = adapted("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=1e4)
    assert perplexity(model, records(3), 2) == math.inf
