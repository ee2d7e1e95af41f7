"""Perplexity over blocks, against the definition and a uniform model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, adapted, records, row_loss
from tiny_tokenizers import records as texts
from tiny_tokenizers import tokenizer

from dptune.core.errors import ConfigError
from dptune.records.reading.record import Text
from dptune.training.evaluation import beginning, in_blocks, score_blocks
from dptune.training.tokens.encoding import tokens_of


@pytest.mark.parametrize("size", [2, 3, 7, 100])
def test_blocks_hold_each_records_tokens_in_order(size: int) -> None:
    tokens = records(9)
    blocks = in_blocks(tokens, size)
    assert np.concatenate(blocks.rows).tolist() == np.concatenate(tokens.rows).tolist()
    assert len(blocks.rows) == sum(math.ceil(len(row) / size) for row in tokens.rows)
    assert max(map(len, blocks.rows)) == min(size, max(map(len, tokens.rows)))


def test_each_block_is_read_alone_and_its_first_token_is_not_predicted() -> None:
    model, tokens = adapted(randomised=True), records(7)
    texts = ["é" * len(row) for row in tokens.rows]  # two bytes each
    blocks = in_blocks(tokens, 4)
    long = [row for row in blocks.rows if len(row) > 1]
    assert len(long) < len(blocks.rows)
    with torch.no_grad():
        losses = np.array([float(row_loss(model, row)) for row in long])
    counts = np.array([len(row) - 1 for row in long])
    mean = float((losses * counts).sum() / counts.sum())
    for rows in (1, 5):
        found = score_blocks(model, blocks, texts, rows)
        assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
        assert found.perplexity_per_block == pytest.approx(float(np.exp(losses).mean()), rel=1e-5)
        assert found.bits_per_byte == pytest.approx(mean / math.log(2) / 2, rel=1e-5)


def test_a_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    model = adapted("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    tokens = records(5)
    found = score_blocks(model, in_blocks(tokens, 6), ["a" * len(row) for row in tokens.rows], 4)
    assert found.perplexity == pytest.approx(VOCABULARY)
    assert found.perplexity_per_block == pytest.approx(VOCABULARY)
    assert found.bits_per_byte == pytest.approx(math.log2(VOCABULARY))


def test_a_token_that_begins_a_text_stands_for_no_byte() -> None:
    """A text costs the same bits whether its tokenizer begins with a token of its own or not."""
    model = adapted("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    plain, texts = records(5), [str(number) * 8 for number in range(5)]
    begun = replace(plain, rows=[np.concatenate([[1], row]).astype(np.int32) for row in plain.rows])
    blocks = [in_blocks(tokens, 100) for tokens in (plain, begun)]
    with_begin = score_blocks(model, blocks[1], texts, 4, begins=1).bits_per_byte
    assert with_begin == pytest.approx(score_blocks(model, blocks[0], texts, 4).bits_per_byte)


@pytest.mark.parametrize("begins", [True, False])
def test_the_token_that_begins_a_text_is_the_tokenizers_own(begins: bool) -> None:
    found = tokenizer(begins=begins)
    tokens = tokens_of(texts(Text("abc"), Text("ab")), found, 100)
    assert beginning(tokens, found) == (found.bos_token_id if begins else None)
    found.bos_token = found.eos_token  # as GPT-2's, which puts it nowhere by itself
    assert beginning(tokens_of(texts(Text("abc")), tokenizer(), 100), found) is None


def test_what_leaves_nothing_to_predict_is_refused() -> None:
    with pytest.raises(ConfigError, match="block: 1 tokens leave nothing"):
        in_blocks(records(3), 1)
    tokens = records(3)
    short = in_blocks(tokens, 2)
    alone = type(short)([row[:1] for row in short.rows], padding=0, width=3)
    with pytest.raises(ConfigError, match="no text has two tokens"):
        score_blocks(adapted(), alone, ["a", "b", "c"], 2)
