"""Ids and labels beside those of TRL's own trainer, on the same rows: what it prepares, as its collator hands it on.

Known to differ, each in a test here: TRL pads to the longest row of a batch, and keeps one token more; drops records
without loss; counts whole chats unless it is asked for what assistants say, and finds that by marks alone; and ends a
text by its end-of-text token's name, which comes twice where the tokenizer adds that token by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CPU, llama
from tiny_tokenizers import CHATML, MARKED, learned_pieces, tokenizer
from tokenizers import processors

from dptune.records.reading.read import read
from dptune.records.reading.source import RecordSource
from dptune.training.data import Tokens
from dptune.training.losses import COUNTED
from dptune.training.tokens.encoding import tokens_of

datasets = pytest.importorskip("datasets", reason="the datasets library is not installed: pip install 'dptune[bench]'")
trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'dptune[bench]'")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # TRL's own default

IGNORED, WIDTH = -100, 40
Row = Mapping[str, Any]
Labelled = list[tuple[list[int], list[int]]]  # ids, and the same with IGNORED where there is no loss

PAIRS = [
    {"prompt": "ab", "completion": "cd"},
    {"prompt": "", "completion": "a"},
    {"prompt": "ab: ", "completion": "12"},
    {"prompt": "ab:", "completion": " 12\n"},
    {"prompt": "a b c", "completion": "ab cab<end>"},
    {"prompt": "dab a", "completion": "b dab"},
    {"prompt": "12", "completion": "123"},
]
TEXTS = [{"text": text} for text in ("ab cd", "a", " 12 ", "dab cab ab", "ab<end>")]


def said(*texts: str) -> Row:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


CHATS = [said("ab", "12"), said("a", ""), said("a", "b", "c 1", "d"), said("1", "2", "3"), said("ab ", " c ", "", "d")]
CHATS.append({"messages": [{"role": "system", "content": "ab"}, *said("c", "d")["messages"]]})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def trainer(rows: Sequence[Row], tokens: Any, folder: Path, **options: Any) -> Any:
    """TRL's trainer, which prepares its rows while it is made."""
    options = {"max_length": WIDTH, **options}
    config = trl.SFTConfig(str(folder / "trl"), bf16=False, use_cpu=True, report_to="none", **options)
    data = datasets.Dataset.from_list(list(rows))
    model = llama().requires_grad_(True)
    model.resize_token_embeddings(len(tokens), mean_resizing=False)
    return trl.SFTTrainer(model, args=config, train_dataset=data, processing_class=tokens)


def of_trl(rows: Sequence[Row], tokens: Any, folder: Path, **options: Any) -> Labelled:
    """What TRL's collator makes of the rows, without its padding."""
    made = trainer(rows, tokens, folder, **options)
    batch = made.data_collator([made.train_dataset[n] for n in range(len(made.train_dataset))])
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), lengths, strict=True)
    return [(ids[:length], labels[:length]) for ids, labels, length in pairs]


def tokens_from(rows: Sequence[Row], tokens: Any, width: int = WIDTH + 1, loss_on: Any = None) -> Tokens:
    """Ours; one position more than TRL's, for the last one stays padding."""
    return tokens_of(read(RecordSource(list(rows))), tokens, width, loss_on)


def of_dptune(rows: Sequence[Row], tokens: Any, width: int = WIDTH + 1, loss_on: Any = None) -> Labelled:
    """What a batch of the private step holds, without its padding."""
    found = tokens_from(rows, tokens, width, loss_on)
    ids, mask = found.batch(np.arange(len(found.rows)), CPU)
    labels = torch.where(mask == COUNTED, ids, IGNORED)
    lengths = (mask != 0).sum(dim=1).tolist()
    return [(ids[n, :length].tolist(), labels[n, :length].tolist()) for n, length in enumerate(lengths)]


TOKENIZERS = {
    "characters": lambda: tokenizer(),
    "with a beginning": lambda: tokenizer(begins=True),
    "a token of both sides": lambda: tokenizer(merges=("b: 1", "ab", "bc")),
    "learned bytes": lambda: learned_pieces(False),
    "learned, with marked spaces": lambda: learned_pieces(True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prompts_and_completions_are_those_of_trl(name: str, tmp_path: Path) -> None:
    tokens = TOKENIZERS[name]()
    expected = of_trl(PAIRS, tokens, tmp_path)
    assert of_dptune(PAIRS, tokens) == expected
    assert {IGNORED} != {label for _, labels in expected for label in labels} != set()
    whole = of_trl(PAIRS, tokens, tmp_path, completion_only_loss=False)
    assert of_dptune(PAIRS, tokens, loss_on="all") == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_those_of_trl(name: str, tmp_path: Path) -> None:
    tokens = TOKENIZERS[name]()
    assert of_dptune(TEXTS, tokens) == of_trl(TEXTS, tokens, tmp_path)


@pytest.mark.parametrize("begins", [False, True])
def test_what_assistants_say_is_that_of_trl(begins: bool, tmp_path: Path) -> None:
    tokens = tokenizer(begins=begins, template=MARKED)
    expected = of_trl(CHATS, tokens, tmp_path, assistant_only_loss=True)
    assert of_dptune(CHATS, tokens) == expected
    assert all(IGNORED in labels and set(labels) != {IGNORED} for _, labels in expected)


TOOLS = '[{"type": "function", "function": {"name": "ab", "parameters": {}}}]'
WITH_TOOLS = "{% if tools %}<s>{{ tools[0]['function']['name'] }}{{ tone or '' }}<e>{% endif %}"


def test_tools_and_own_options_reach_the_template_as_in_trl(tmp_path: Path) -> None:
    rows = [{**row, "tools": TOOLS, "chat_template_kwargs": {"tone": "1"}} for row in CHATS]
    tokens = tokenizer(template=WITH_TOOLS + MARKED)
    expected = of_trl(rows, tokens, tmp_path, assistant_only_loss=True)
    assert of_dptune(rows, tokens) == expected != of_dptune(CHATS, tokens)


def test_a_prompt_and_a_completion_of_messages_are_those_of_trl(tmp_path: Path) -> None:
    some = [row["messages"] for row in CHATS]
    rows = [{"prompt": said[:-1], "completion": said[-1:], "tools": TOOLS} for said in some]
    for template in (MARKED, CHATML):
        tokens = tokenizer(template=WITH_TOOLS + template)
        assert of_dptune(rows, tokens, 2 * WIDTH + 1) == of_trl(rows, tokens, tmp_path, max_length=2 * WIDTH)


def test_without_being_asked_trl_counts_whole_chats(tmp_path: Path) -> None:
    tokens = tokenizer(template=MARKED)
    expected = of_trl(CHATS, tokens, tmp_path)
    assert of_dptune(CHATS, tokens, loss_on="all") == expected != of_dptune(CHATS, tokens)


def test_a_template_without_marks_means_here_what_marks_say_to_trl(tmp_path: Path) -> None:
    """TRL refuses it, unless it knows a marked one in its place."""
    unmarked, marked = tokenizer(template=CHATML), tokenizer(template=MARKED)
    assert of_dptune(CHATS, unmarked) == of_trl(CHATS, marked, tmp_path, assistant_only_loss=True)
    with pytest.raises(ValueError, match="chat template"):
        of_trl(CHATS, unmarked, tmp_path, assistant_only_loss=True)


def test_both_cut_the_end_and_we_keep_a_place_of_padding(tmp_path: Path) -> None:
    rows, tokens = [{"prompt": "ab", "completion": "c" * 20}, {"prompt": "a", "completion": "b"}], tokenizer()
    expected = of_trl(rows, tokens, tmp_path, max_length=8)
    assert [len(ids) for ids, _ in expected] == [8, 3]
    assert of_dptune(rows, tokens, width=9) == expected
    assert [len(ids) for ids, _ in of_dptune(rows, tokens, width=8)] == [7, 3]


def test_trl_drops_a_record_without_loss_which_here_stays_one(tmp_path: Path) -> None:
    """A unit whose records were dropped would not be counted, and how many units there are is public."""
    rows, tokens = [{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a", "completion": "b"}], tokenizer()
    expected = of_trl(rows, tokens, tmp_path, max_length=8)
    ours = of_dptune(rows, tokens, width=9)
    assert ours[1:] == expected
    assert set(ours[0][1]) == {IGNORED}


def test_trl_pads_to_the_longest_row_and_we_to_the_width(tmp_path: Path) -> None:
    rows, tokens = [{"text": "ab"}, {"text": "abcd"}], tokenizer()
    made = trainer(rows, tokens, tmp_path)
    longest = made.data_collator([made.train_dataset[n] for n in range(2)])["input_ids"].shape
    ids, _ = tokens_from(rows, tokens).batch(np.arange(2), CPU)
    assert (longest, ids.shape) == ((2, 5), (2, WIDTH + 1))


def test_a_tokenizer_that_ends_texts_by_itself_ends_them_twice_for_trl(tmp_path: Path) -> None:
    tokens = tokenizer()
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 0)]
    )
    rows, end = [{"prompt": "ab", "completion": "cd"}], tokens.eos_token_id
    ((theirs, labels),) = of_trl(rows, tokens, tmp_path)
    ((ours, counted),) = of_dptune(rows, tokens)
    assert theirs == [*ours, end]
    assert labels == [*counted, end]
    assert ours.count(end) == 1
