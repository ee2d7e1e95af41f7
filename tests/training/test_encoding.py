"""Which tokens count: against the rules of completion-only collators written down again, and character by character."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CPU
from tiny_tokenizers import CHATML, LETTERS, MARKED, chat, learned_pieces, records, tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from dptune.core.errors import ConfigError, DataError
from dptune.records.parquet_file import encode_content
from dptune.records.reading.record import Chat, Content, PromptTarget, Text
from dptune.training.data import Tokens, plain_ids, tokenize
from dptune.training.losses import sequence_losses
from dptune.training.tokens import token_file
from dptune.training.tokens.chat_template import render_chat
from dptune.training.tokens.encoding import record_batches, stored_tokens, summary, tokens_of

WIDTH = 40
IGNORED = -100


def encoded(content: Content, tokens: Any, loss_on: Any = None, width: int = WIDTH) -> tuple[list[int], list[bool]]:
    """Ids and which count, of one record."""
    (row,) = tokens_of(records(content), tokens, width, loss_on).rows
    return plain_ids(row).tolist(), (row >= 0).tolist()


def counted_text(content: Content, tokens: Any, loss_on: Any = None) -> str:
    ids, counts = encoded(content, tokens, loss_on, 400)
    return "".join(tokens.convert_ids_to_tokens([i for i, counted in zip(ids, counts, strict=True) if counted]))


# --- texts and special tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [False, True])
def test_a_text_begins_as_the_tokenizer_does_and_ends_once(begins: bool) -> None:
    tokens = tokenizer(begins=begins)
    start = ["<begin>"] if begins else []
    for text in ("ab", "ab<end>"):
        ids, counts = encoded(Text(text), tokens)
        assert tokens.convert_ids_to_tokens(ids) == [*start, "a", "b", "<end>"]
        assert all(counts)


def test_a_tokenizer_that_ends_texts_by_itself_ends_a_prompt_nowhere() -> None:
    tokens = tokenizer()
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 0)]
    )
    ids, counts = encoded(PromptTarget("ab", "cd"), tokens)
    assert tokens.convert_ids_to_tokens(ids) == ["a", "b", "c", "d", "<end>"]
    assert counts == [False, False, True, True, True]


# --- prompts and targets ---------------------------------------------------------------------------------------

words = st.text(LETTERS, max_size=12)


@pytest.mark.parametrize("begins", [False, True])
@given(prompt=words, target=words.filter(str.strip))
def test_labels_are_those_of_trl_for_prompts_and_completions(begins: bool, prompt: str, target: str) -> None:
    """TRL's trainer: tokens of prompt + completion + end, of which those of the prompt alone are ignored by number."""
    tokens = tokenizer(begins=begins)
    ours, counts = encoded(PromptTarget(prompt, target), tokens)
    whole = tokens(prompt + target + "<end>")["input_ids"]
    ignored = len(tokens(prompt)["input_ids"])
    labels = [IGNORED] * ignored + whole[ignored:]
    assert [i if counted else IGNORED for i, counted in zip(ours, counts, strict=True)] == labels


@given(question=st.text("abc ", max_size=8), answer=st.text("abc ", min_size=1, max_size=8).filter(str.strip))
def test_labels_are_those_of_a_completion_only_collator(question: str, answer: str) -> None:
    """TRL's older rule: whatever precedes and includes the ids of the response template is ignored."""
    tokens, response = tokenizer(), "\n12:"
    ids, counts = encoded(PromptTarget(question + response, answer), tokens)
    sought = tokens(response)["input_ids"]
    starts = [n for n in range(len(ids)) if ids[n : n + len(sought)] == sought]
    labels = [IGNORED] * (starts[-1] + len(sought)) + ids[starts[-1] + len(sought) :]
    assert [i if counted else IGNORED for i, counted in zip(ids, counts, strict=True)] == labels


def test_losses_are_those_of_ignored_labels() -> None:
    """The mean over the tokens that count, as ``cross_entropy`` with ``ignore_index`` has it for one record."""
    pairs = [PromptTarget("ab", "cde"), PromptTarget("", "a"), PromptTarget("abcd ef", "1")]
    tokens = tokens_of(records(*pairs), tokenizer(), WIDTH)
    ids, mask = tokens.batch(np.arange(3), CPU)
    logits = torch.randn(3, WIDTH, 40, generator=torch.Generator().manual_seed(0))
    for row, loss in enumerate(sequence_losses(logits, ids, mask)):
        signed = torch.from_numpy(tokens.rows[row].astype(np.int64))
        labels = signed.where(signed >= 0, IGNORED)
        expected = cross_entropy(logits[row, : len(labels) - 1], labels[1:], ignore_index=IGNORED)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_a_token_of_both_sides_counts() -> None:
    tokens = tokenizer(merges=("bc",))
    ids, counts = encoded(PromptTarget("ab", "cd"), tokens)
    assert tokens.convert_ids_to_tokens(ids) == ["a", "bc", "d", "<end>"]
    assert counts == [False, True, True, True]


@pytest.mark.parametrize("spaced", [False, True], ids=["bytes", "spaces"])
@given(prompt=st.text("abcd: 12", max_size=10), target=st.text("abcd: 12", min_size=1, max_size=10).filter(str.strip))
def test_every_character_of_a_target_counts_whatever_tokens_join(spaced: bool, prompt: str, target: str) -> None:
    tokens = PIECES[spaced]
    ids, counts = encoded(PromptTarget(prompt, target), tokens)
    assert ids == [*tokens(prompt + target)["input_ids"], tokens.eos_token_id]
    assert counts == sorted(counts)
    read = tokens.decode([i for i, counted in zip(ids, counts, strict=True) if not counted])
    assert prompt.strip().startswith(read.strip())
    assert sum(counts) >= 2


PIECES = [learned_pieces(False), learned_pieces(True)]


def test_all_counts_prompts_too() -> None:
    assert counted_text(PromptTarget("ab", "cd"), tokenizer(), "all") == "abcd<end>"


def test_what_is_cut_is_counted_and_a_record_without_loss_stays_one() -> None:
    pairs = [PromptTarget("ab", "c"), PromptTarget("abcdefgh", "c"), PromptTarget("abcd", "ef"), Text("a" * 9)]
    tokens = tokens_of(records(*pairs), tokenizer(), 6)
    assert [len(row) for row in tokens.rows] == [4, 5, 5, 5]
    assert (tokens.truncated, tokens.without_loss) == (3, 1)
    told = summary(tokens)
    assert (list(told.lengths), told.limit, told.cut, told.without_loss) == ([4, 5, 5, 5], 5, 3, 1)


@pytest.mark.parametrize(
    ("content", "loss_on"),
    [(Text("a"), "completion"), (PromptTarget("a", "b"), "assistant"), (Chat(({"role": "user"},)), "completion")],
)
def test_a_loss_on_nothing_is_refused(content: Content, loss_on: Any) -> None:
    with pytest.raises(ConfigError, match=rf"training\.loss_on: '{loss_on}' does not exist in row 1 of a\.jsonl"):
        encoded(content, tokenizer(), loss_on)


def test_a_length_that_predicts_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.max_length"):
        tokens_of(records(Text("a")), tokenizer(), 2)


# --- chats -----------------------------------------------------------------------------------------------------


turns = st.lists(st.text("abc 12", max_size=6), min_size=2, max_size=7)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by marks"])
@given(said=turns)
def test_what_an_assistant_says_counts_with_its_end(template: str, said: list[str]) -> None:
    expected = "".join(text + "<e>" for text in said[1::2])
    assert counted_text(chat(*said), tokenizer(template=template)) == expected


@given(said=turns)
def test_marks_are_those_of_the_library(said: list[str]) -> None:
    tokens = tokenizer(template=MARKED)
    messages = list(chat(*said).messages)
    theirs = tokens.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, counts = encoded(chat(*said), tokens, width=400)
    assert (ids, counts) == (theirs["input_ids"], [bool(one) for one in theirs["assistant_masks"]])


def test_a_dropped_space_does_not_make_the_rest_of_a_chat_count() -> None:
    """The library's mask goes on to the end where the last character between marks is in no token."""
    core = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2, "c": 3, "d": 4}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")
    tokens.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }} {% endgeneration %}"
        "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
    )
    assert encoded(chat("a", "b", "c", "d"), tokens) == ([1, 2, 3, 4], [False, True, False, True])


@given(said=turns)
def test_prefixes_find_what_marks_say(said: list[str]) -> None:
    one, other = (encoded(chat(*said), tokenizer(template=template)) for template in (CHATML, MARKED))
    assert one == other


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_chat_is_its_template_and_nothing_more(template: str) -> None:
    tokens = tokenizer(begins=True, template=template)
    ids, counts = encoded(chat("ab", "1"), tokens, "all")
    assert "".join(tokens.convert_ids_to_tokens(ids)) == "<s>user:ab<e><s>assistant:1<e>"
    assert all(counts)


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name() -> None:
    """As those that drop the thoughts of all assistants but the last: its prefixes are no prefixes."""
    template = (
        "{% for message in messages %}<s>{{ message['role'] }}:"
        "{{ message['content'] if loop.last or message['role'] == 'user' else '' }}<e>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    tokens = tokenizer(template=template)
    assert counted_text(chat("a", "b"), tokens) == "b<e>"
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: message 2 is rendered otherwise.*loss_on: all"):
        encoded(chat("a", "b", "c", "d"), tokens)
    assert encoded(chat("a", "b", "c", "d"), tokens, "all")[1]


def test_a_template_that_reverses_messages_is_refused_by_name() -> None:
    """No token would count in the loss, so the run would train on noise only."""
    tokens = tokenizer(template="{% for message in messages|reverse %}<s>{{ message['content'] }}<e>{% endfor %}")
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: message 2 is rendered otherwise.*loss_on: all"):
        encoded(chat("a", "b"), tokens)


def test_a_chat_that_cannot_be_rendered_is_located() -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    first = Chat(({"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}))
    with pytest.raises(DataError, match=r"row 2: the chat template does not take"):
        tokens_of(records(chat("a", "b"), first), tokenizer(template=template), WIDTH)


def test_a_chat_without_an_assistant_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 1: no message is an assistant's.*loss_on: all"):
        encoded(chat("a"), tokenizer(template=CHATML))
    assert encoded(chat("a"), tokenizer(template=CHATML), "all")


@pytest.mark.parametrize("loss_on", [None, "all"])
def test_a_tokenizer_without_a_template_is_refused(loss_on: Any) -> None:
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        encoded(chat("a", "b"), tokenizer(), loss_on)


# --- on disk ---------------------------------------------------------------------------------------------------


def test_masks_survive_a_token_file(tmp_path: Path) -> None:
    mixed = records(PromptTarget("ab", "c"), Text("abc"), PromptTarget("a" * 50, "b"))
    expected = tokens_of(mixed, tokenizer(), WIDTH)
    path = tmp_path / "train.arrow"
    token_file.write(path, record_batches(mixed, tokenizer(), WIDTH), padding=0, width=WIDTH)
    found = token_file.open_corpus(path)
    assert [row.tolist() for row in found.tokens.rows] == [row.tolist() for row in expected.rows]
    assert found.units.tolist() == [0, 1, 2]
    assert (found.tokens.truncated, found.tokens.without_loss) == (1, 1)
    for ours, theirs in zip(batch(found.tokens), batch(expected), strict=True):
        assert ours.equal(theirs)


def batch(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens.batch(np.array([2, 0, 1]), CPU, height=4)


@pytest.mark.parametrize("begins", [False, True])
def test_a_text_has_the_same_ids_in_the_pipeline_as_from_a_users_file(begins: bool) -> None:
    """The pipeline encodes many texts at once, and left out the beginning-of-text token that Llama's texts have."""
    chosen = tokenizer(begins=begins)
    texts = ["abc", "a b", "abcdefgh" * 4]
    piped, own = tokenize(texts, chosen, 12), tokens_of(records(*map(Text, texts)), chosen, 12)
    assert [row.tolist() for row in piped.rows] == [row.tolist() for row in own.rows]
    assert piped.truncated == own.truncated == 1
    assert (piped.rows[0][0] == chosen.bos_token_id) == begins


@pytest.mark.parametrize(("form", "content"), [("pair", PromptTarget("ab", "cd")), ("messages", chat("ab", "cd"))])
def test_stored_records_have_the_tokens_of_the_records_and_one_left_out_has_none(form: str, content: Content) -> None:
    chosen = tokenizer(template=CHATML)
    found = stored_tokens([encode_content(content), ""], chosen, form=form, file="a", max_length=40)
    assert found.rows[0].tolist() == tokens_of(records(content), chosen, 40).rows[0].tolist()
    assert found.rows[1].tolist() == [chosen.eos_token_id]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by marks"])
def test_a_template_that_prints_the_date_gives_one_text_for_ever(template: str) -> None:
    call = "{{ strftime_now('%d %b %Y, 100 %%') }}"
    dated = f"\n{{% if strftime_now is defined %}}{call}{{% endif %}}\n {template}"
    told, expected = tokenizer(template=dated), tokenizer(template=dated.replace(call, "26 Jul 2024, 100 %"))
    said = chat("hello", "a cat")
    assert render_chat(said.messages, told) == render_chat(said.messages, expected)
    assert "26 Jul 2024, 100 %" in render_chat(said.messages, told)
    assert encoded(said, told) == encoded(said, expected)
