"""Perplexity of texts that are read in blocks of tokens, as papers on language models report it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dptune.errors import ConfigError
from dptune.training.data import Tokens
from dptune.training.evaluation import record_losses


@dataclass(frozen=True)
class BlockScores:
    """How well a model predicts texts. Aggregates of the texts: private if they are.

    Attributes:
        perplexity: exp of the mean loss over all predicted tokens.
        perplexity_per_block: mean over blocks of exp(a block's mean loss).
        bits_per_byte: the mean loss in bits, times the tokens over the bytes (UTF-8) of the texts, so that a token that
            is not predicted counts as the mean. It alone can be compared between models with different tokenizers.
    """

    perplexity: float
    perplexity_per_block: float
    bits_per_byte: float


def in_blocks(tokens: Tokens, size: int) -> Tokens:
    """Every record's tokens in blocks of ``size``, of which a record's last one may be shorter; none holds two records.

    Raises: ConfigError for a size that leaves nothing to predict.
    """
    if size < 2:
        raise ConfigError("block", f"{size} tokens leave nothing to predict", fix="give 2 or more")
    rows = [row[start : start + size] for row in tokens.rows for start in range(0, len(row), size)]
    return replace(tokens, rows=rows, width=size + 1)


def beginning(tokens: Tokens, tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before every text; None if it puts none."""
    begin = tokenizer.bos_token_id
    return begin if begin is not None and all(int(row[0]) == begin for row in tokens.rows) else None


def score_blocks(
    model: Any, blocks: Tokens, texts: Sequence[str], rows: int, *, begins: int | None = None, label: str = ""
) -> BlockScores:
    """Score a causal model on blocks, each read alone: of a block all tokens are predicted but the first.

    Args:
        blocks: as ``in_blocks`` makes them of ``texts``.
        rows: blocks of a batch.
        begins: the token that stands at the beginning of a text, for none of its bytes; None without one.
        label: what the meter of progress says; empty shows none.

    Raises: ConfigError if no block has two tokens.
    """
    losses, counts = record_losses(model, blocks, rows, label=label)
    if not counts.sum():
        raise ConfigError("data", "no text has two tokens, so nothing is predicted", fix="give longer texts")
    predicted, mean = counts > 0, float(losses.sum() / counts.sum())
    tokens = sum(len(row) - (begins is not None and int(row[0]) == begins) for row in blocks.rows)
    tokens_per_byte = tokens / sum(len(text.encode()) for text in texts)
    with np.errstate(over="ignore"):  # a token of probability 0 makes it infinite
        per_block = float(np.exp(losses[predicted] / counts[predicted]).mean())
        return BlockScores(float(np.exp(mean)), per_block, mean / math.log(2) * tokens_per_byte)
