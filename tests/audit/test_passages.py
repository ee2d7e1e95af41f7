"""Passages are read as training reads the records, whatever their form and whatever the tokenizer puts around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import row_loss
from tiny_tokenizers import CHATML, MARKED, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from dptune.audit.text.extraction import before_secret
from dptune.audit.text.likelihood import canary_passage, ending_losses, passage_ids, passage_of
from dptune.records.canaries import content_with
from dptune.records.reading.record import Chat, Content, PromptTarget, Record, Text
from dptune.training.data import plain_ids
from dptune.training.tokens.encoding import tokens_of

SECRET, WIDTH = "abcdefghab", 64
PAIR = PromptTarget("abc:", " def 1")
CHAT = Chat(
    (
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "de"},
        {"role": "user", "content": "f 1"},
        {"role": "assistant", "content": "cab"},
    )
)


def model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=len(tokenizer()), n_positions=WIDTH, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("content", [Text("abc: def 1"), PAIR, CHAT, Chat(CHAT.messages[:2])])
@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_passage_has_the_tokens_that_training_reads(content: Content, begins: bool, template: str) -> None:
    chosen = tokenizer(begins=begins, template=template)
    (row,) = tokens_of([Record(content, 0, "a.jsonl", 1)], chosen, WIDTH).rows
    (ids,) = passage_ids(chosen, [passage_of(content, chosen)])
    trained = plain_ids(row).tolist()
    assert ids in (trained, trained[:-1]), "training puts an end-of-text token after texts and targets"


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("content", [PAIR, Chat(CHAT.messages[:2])])
def test_an_ending_is_what_training_learns(content: Content, begins: bool) -> None:
    """Its mean loss is the record's own, but for the end-of-text token after a target."""
    chosen = tokenizer(begins=begins, template=CHATML)
    (row,) = tokens_of([Record(content, 0, "a.jsonl", 1)], chosen, WIDTH).rows
    learned = row[:-1] if isinstance(content, PromptTarget) else row
    with torch.no_grad():
        expected = float(row_loss(model(), learned))
    found = ending_losses(model(), chosen, [passage_of(content, chosen)], max_length=WIDTH, rows=1)
    assert found.tokens.tolist() == [int((learned[1:] >= 0).sum())]
    assert found.mean == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("form", ["text", "pair", "messages"])
def test_a_canarys_ending_holds_its_secret_and_its_prompt_does_not(form: str) -> None:
    chosen = tokenizer(begins=True, template=CHATML)
    passage = canary_passage("abc.", SECRET, form, chosen)
    assert SECRET in passage.ending
    assert SECRET not in passage.prompt
    assert before_secret(passage, SECRET).text == passage.text.partition(SECRET)[0]
    content = content_with("abc.", SECRET, form)
    (row,) = tokens_of([Record(content, 0, "a.jsonl", 1)], chosen, WIDTH).rows
    (ids,) = passage_ids(chosen, [passage])
    assert plain_ids(row).tolist()[: len(ids)] == ids
    offset = len(passage_ids(chosen, [before_secret(passage, SECRET)])[0])
    assert (np.asarray(row[offset : offset + len(SECRET)]) >= 0).all(), "the secret counts in the loss"


def test_a_chat_that_a_user_ends_is_judged_by_its_last_answer() -> None:
    chosen = tokenizer(template=CHATML)
    passage = passage_of(Chat(CHAT.messages[:3]), chosen)
    assert passage.ending == "de<e>"
    assert passage.rendered
