"""Losses of endings against one text at a time, written down a second time."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from audit_models import LENGTH, RECORD, SECRET, gpt2, tokenizer
from transformers import ByT5Tokenizer

from dptune.audit.text.likelihood import EndingLosses, Passage, ending_losses, endings_of_one_prompt
from dptune.core.errors import ConfigError
from dptune.records.canaries import suffix

PASSAGES = [
    Passage(RECORD, suffix(SECRET)),
    Passage(RECORD + "The pat", "ient has diabetes."),  # a token lies on both sides
    Passage("", RECORD),  # nothing predicts the first token
    Passage(RECORD * 3, " x"),
    Passage(RECORD, ""),
    Passage("", ""),
    Passage("Sugar at 7:", " 140 mg, naïve."),
    Passage("T", "h"),
]


ENDINGS = [suffix(SECRET), suffix("K7Q2ZB90XX"), suffix("0123456789"), " secret"]


@cache
def model() -> Any:
    return gpt2()


@torch.no_grad()
def one_by_one(passages: list[Passage], max_length: int) -> tuple[list[float], list[int]]:
    totals, counts = [], []
    for passage in passages:
        ids = tokenizer()(passage.prompt + passage.ending)["input_ids"][: max_length - 1]
        total, count = 0.0, 0
        for position in range(1, len(ids)):
            # Not the offsets: where the text read so far goes beyond the prompt.
            if len(tokenizer().decode(ids[: position + 1])) > len(passage.prompt):
                logits = model()(input_ids=torch.tensor([ids[:position]])).logits[0, -1].double()
                total -= float(torch.log_softmax(logits, dim=0)[ids[position]])
                count += 1
        totals.append(total)
        counts.append(count)
    return totals, counts


def losses(passages: list[Passage], max_length: int = LENGTH, rows: int = 3) -> EndingLosses:
    return ending_losses(model(), tokenizer(), passages, max_length=max_length, rows=rows)


@pytest.mark.parametrize("max_length", [LENGTH, 20, 8, 3])
def test_losses_are_those_of_one_text_at_a_time(max_length: int) -> None:
    result = losses(PASSAGES, max_length)
    totals, counts = one_by_one(PASSAGES, max_length)
    assert result.tokens.tolist() == counts
    assert result.total == pytest.approx(totals, rel=1e-4, abs=1e-4)
    assert result.mean == pytest.approx([total / max(count, 1) for total, count in zip(totals, counts, strict=True)])


def test_the_passages_test_what_they_should() -> None:
    """A token on both sides of the border that is not the first, and more than one length."""
    offsets = tokenizer()(PASSAGES[1].prompt + PASSAGES[1].ending, return_offsets_mapping=True)["offset_mapping"]
    assert any(start < len(PASSAGES[1].prompt) < end for start, end in offsets[1:])
    assert len({len(tokenizer()(passage.prompt + passage.ending)["input_ids"]) for passage in PASSAGES}) > 5


@pytest.mark.parametrize("rows", [1, 2, len(PASSAGES), 100])
def test_losses_depend_neither_on_rows_nor_on_order(rows: int) -> None:
    result = losses(PASSAGES)
    for order in (np.arange(len(PASSAGES)), np.random.default_rng(rows).permutation(len(PASSAGES))):
        other = losses([PASSAGES[index] for index in order], rows=rows)
        assert other.tokens.tolist() == result.tokens[order].tolist()
        assert other.total == pytest.approx(result.total[order], rel=1e-4, abs=1e-4)


def test_a_text_that_is_cut_before_its_ending_has_no_tokens() -> None:
    prompt = len(tokenizer()(RECORD)["input_ids"])
    at, after = (losses(PASSAGES[:1], prompt + more) for more in (1, 2))
    assert (at.tokens.tolist(), at.total.tolist(), at.mean.tolist()) == ([0], [0.0], [0.0])
    assert after.tokens.tolist() == [1]
    assert after.total[0] > 0


def test_the_likelier_ending_loses_less() -> None:
    """A model that finds one token likely after anything."""
    biased = gpt2()
    token = tokenizer()("A")["input_ids"][0]
    biased.lm_head = torch.nn.Linear(32, len(tokenizer()))
    with torch.no_grad():
        biased.lm_head.weight.zero_()
        biased.lm_head.bias.zero_()
        biased.lm_head.bias[token] = 5.0
    passages = [Passage(RECORD, "A" * 4), Passage(RECORD, "B" * 4)]
    result = ending_losses(biased, tokenizer(), passages, max_length=LENGTH, rows=2)
    others = np.log(np.exp(5.0) + len(tokenizer()) - 1)
    assert result.mean == pytest.approx([others - 5, others])


def test_no_gradient_is_kept() -> None:
    changed = gpt2().requires_grad_(True)
    ending_losses(changed, tokenizer(), PASSAGES[:2], max_length=LENGTH, rows=2)
    assert all(parameter.grad is None for parameter in changed.parameters())


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.*Fix: use a fast tokenizer"):
        ending_losses(model(), ByT5Tokenizer(), PASSAGES, max_length=LENGTH, rows=2)


def test_nothing_private_shows_in_a_representation() -> None:
    assert repr(PASSAGES[0]) == "Passage(rendered=False)"
    assert repr(losses(PASSAGES[:1])) == "EndingLosses()"


@pytest.mark.parametrize("endings", [ENDINGS, ENDINGS[:1], ["", *ENDINGS], ["x", "y"]])
@pytest.mark.parametrize("limit", [4, LENGTH])
def test_one_prompts_endings_are_scored_like_any_others(endings: list[str], limit: int) -> None:
    """The prefix that they share runs once; with a short limit the texts are cut, even before they differ."""
    model, prompt = gpt2(), "the patient is not well."
    passages = [Passage(prompt, ending) for ending in endings]
    alone = ending_losses(model, tokenizer(), passages, max_length=limit, rows=2)
    masked: list[bool] = []
    model.register_forward_pre_hook(lambda *given: masked.append("attention_mask" in given[2]), with_kwargs=True)
    together = endings_of_one_prompt(model, tokenizer(), passages, max_length=limit, rows=2)
    assert all(masked), "transformers warns of what has no mask"
    assert together.total == pytest.approx(alone.total, abs=1e-4)
    assert together.tokens.tolist() == alone.tokens.tolist()
