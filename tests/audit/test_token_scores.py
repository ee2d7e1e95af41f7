"""Scores of single tokens against the papers' formulas, written down a second time, one token after another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from audit_models import LENGTH, RECORD, SECRET, gpt2, memorised, tokenizer

from dptune.audit.text.likelihood import (
    Passage,
    TokenLosses,
    ending_losses,
    ending_tokens,
    error_zone,
    min_k,
    token_scores,
    windows,
)
from dptune.records.canaries import suffix

PASSAGES = [
    Passage(RECORD, suffix(SECRET)),
    Passage("", RECORD),
    Passage(RECORD * 3, " x"),
    Passage("", ""),  # nothing to score
]


def tokens(model: torch.nn.Module, rows: int = 3) -> TokenLosses:
    return ending_tokens(model, tokenizer(), PASSAGES, max_length=LENGTH, rows=rows)


def test_tokens_add_up_to_the_losses_of_the_endings() -> None:
    found, whole = tokens(gpt2()), ending_losses(gpt2(), tokenizer(), PASSAGES, max_length=LENGTH, rows=2)
    assert [len(losses) for losses in found.losses] == whole.tokens.tolist()
    assert [losses.sum() for losses in found.losses] == pytest.approx(whole.total.tolist(), rel=1e-4)


def test_each_token_against_its_own_distribution() -> None:
    found = tokens(memorised())
    for place in (0, 1):
        ids = tokenizer()(PASSAGES[place].text)["input_ids"]
        told = len(found.losses[place])
        for back in range(told):
            position = len(ids) - told + back
            logits = memorised()(input_ids=torch.tensor([ids[:position]])).logits[0, -1].detach().double()
            chances = torch.softmax(logits, dim=0).tolist()
            logs = [math.log(chance) for chance in chances]
            mean = sum(chance * log for chance, log in zip(chances, logs, strict=True))
            variance = sum(chance * (log - mean) ** 2 for chance, log in zip(chances, logs, strict=True))
            own = ids[position]
            assert found.losses[place][back] == pytest.approx(-logs[own], rel=1e-3, abs=1e-4)
            assert found.wrong[place][back] == (max(chances) != chances[own])
            assert found.standard[place][back] == pytest.approx((logs[own] - mean) / math.sqrt(variance), rel=1e-2)


def test_tokens_depend_neither_on_rows_nor_on_neighbours() -> None:
    one, other = tokens(memorised(), 1), tokens(memorised(), 4)
    for place in range(len(PASSAGES)):
        assert one.standard[place] == pytest.approx(other.standard[place], rel=1e-3, abs=1e-4)
        assert (one.wrong[place] == other.wrong[place]).all()


def ez_of_the_paper(gains: list[float], wrong: list[bool]) -> float:
    """P / N of arXiv 2601.12104, section 3.4; infinite as its appendix E ranks a text that only rose."""
    up = down = 0.0
    for gain, missed in zip(gains, wrong, strict=True):
        if missed and gain > 0:
            up += gain
        if missed and gain < 0:
            down += -gain
    return up / down if down else math.inf


def wbc_of_the_paper(gains: list[float]) -> float:
    """Equations 10 to 13 of arXiv 2601.02751: w from 2 to 40, ten sizes, sign aggregation."""
    votes = []
    for k in range(1, 11):
        size = round(2 * (40 / 2) ** ((k - 1) / 9))
        if size <= len(gains):
            sums = [sum(gains[start : start + size]) for start in range(len(gains) - size + 1)]
            votes.append(sum(1 for one in sums if one > 0) / len(sums))
    return sum(votes) / len(votes)


def min_k_of_the_paper(values: list[float], k: float = 0.2) -> float:
    """Shi et al. 2024, equation 1, and Zhang et al. 2025: the mean over the k % of tokens with the lowest values."""
    lowest = sorted(values)[: max(1, int(k * len(values)))]
    return sum(lowest) / len(lowest)


@pytest.mark.parametrize("length", [2, 3, 7, 40, 90])
def test_scores_are_the_papers(length: int) -> None:
    chance = np.random.default_rng(length)
    texts = [(chance.normal(size=length), chance.random(length) < 0.6) for _ in range(30)]
    for gains, _ in texts:
        assert windows(gains) == pytest.approx(wbc_of_the_paper(gains.tolist()))
        assert min_k(gains) == pytest.approx(min_k_of_the_paper(gains.tolist()))
    ours = np.array([error_zone(*text) for text in texts])
    theirs = np.array([ez_of_the_paper(gains.tolist(), wrong.tolist()) for gains, wrong in texts])
    finite = np.isfinite(theirs)
    assert ours[finite] == pytest.approx((theirs[finite] - 1) / (theirs[finite] + 1))  # rises with P / N
    assert (ours[~finite] == 1).all()


def test_what_was_learned_ranks_above_what_was_not() -> None:
    learned, other = Passage(RECORD, suffix(SECRET)), Passage(RECORD, suffix("0PLM4UYT7W"))
    found = {
        model: ending_tokens(model, tokenizer(), [learned, other], max_length=LENGTH, rows=2)
        for model in (memorised(), gpt2())
    }
    for values in token_scores(*found.values()).values():
        assert values[0] > values[1]
