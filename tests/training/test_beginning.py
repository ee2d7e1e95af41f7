"""The token before a text: where a tokenizer puts one, where it is made to, and that this survives a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import learned_pieces, records, tokenizer
from tiny_tuning import QUICK, checkpoint
from transformers import AutoTokenizer
from typer.testing import CliRunner

import dptune
from dptune.cli import app
from dptune.core.errors import ConfigError
from dptune.job.settings import TuneSettings
from dptune.records.reading.record import PromptTarget, Text
from dptune.training.models.causal import beginning_of, with_beginning
from dptune.training.tokens.encoding import tokens_of


@pytest.mark.parametrize("made", [tokenizer, lambda: learned_pieces(False), lambda: learned_pieces(True)])
def test_a_tokenizer_puts_a_token_before_each_text_and_still_does_from_its_folder(made: Any, tmp_path: Path) -> None:
    before = made()
    after = with_beginning(before)
    assert beginning_of(before) == []
    (first,) = beginning_of(after)
    assert first == (before.eos_token_id if before.bos_token_id is None else before.bos_token_id)
    for text in ("ab cd", "d: 12"):
        assert after(text)["input_ids"] == [first, *before(text)["input_ids"]]
        assert before(text)["input_ids"][0] != first, "the given tokenizer stays as it is"
    after.save_pretrained(tmp_path)
    assert beginning_of(AutoTokenizer.from_pretrained(tmp_path)) == [first]


def test_one_that_puts_a_token_already_stays() -> None:
    begins = tokenizer(begins=True)
    assert with_beginning(begins) is begins
    assert beginning_of(begins) == [1]


def test_the_first_token_of_a_text_then_counts() -> None:
    words = with_beginning(tokenizer())
    text, pair = tokens_of(records(Text("ab"), PromptTarget("a", "b")), words, max_length=8).rows
    a, b, end = (*words("ab")["input_ids"][1:], words.eos_token_id)
    assert text.tolist() == [1, a, b, end]  # of position 1 on, each is predicted and counts
    assert np.where(pair < 0, ~pair, pair).tolist() == [1, a, b, end]
    assert (pair < 0).tolist() == [True, True, False, False]


def test_a_tokenizer_that_cannot_is_refused() -> None:
    class Fixed:
        bos_token, eos_token, bos_token_id = "<s>", "</s>", 1

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [7]}

    with pytest.raises(ConfigError, match=r"add_bos_token: the tokenizer \(Fixed\) does not take it"):
        with_beginning(Fixed())
    nothing = tokenizer()
    nothing.bos_token = nothing.eos_token = None
    with pytest.raises(ConfigError, match="neither such a token nor one of the end"):
        with_beginning(nothing)


def test_beginnings_are_not_added_to_chats_nor_for_classifiers() -> None:
    chats = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{n}"}]} for n in range(9)
    ]
    with pytest.raises(ConfigError, match="add_bos_token: is not for chats, which their template begins"):
        dptune.tune(checkpoint(), chats, epsilon=8, add_bos_token=True, delta=1e-3, **QUICK)
    with pytest.raises(ConfigError, match="add_bos_token: is for task generate"):
        TuneSettings(epsilon=8, task="classify", add_bos_token=True)


def test_suggest_hands_it_on() -> None:
    given = ["suggest", "--model", str(checkpoint()), "--units", "500", "--epsilon", "8", "--add-bos-token"]
    said = CliRunner().invoke(app, given)
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1].endswith(" --add-bos-token")
