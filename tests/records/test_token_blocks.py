"""Blocks of at most so many tokens: whole words, none lost, and as many as fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_benchmark_texts import invented as invented
from tiny_tokenizers import learned_pieces, tokenizer

from dptune.core.errors import ConfigError
from dptune.records.catalogue import label_of
from dptune.records.wikitext import token_blocks, wikitext

WORDS = st.lists(st.text("abcd", min_size=1, max_size=9), min_size=1, max_size=40)
TOKENIZERS = [tokenizer(), tokenizer(begins=True), learned_pieces(spaced=False), learned_pieces(spaced=True)]


def tokens(words: list[str], reader: Any) -> int:
    return len(reader(" ".join(words))["input_ids"])


@pytest.mark.parametrize("reader", TOKENIZERS, ids=["letters", "begins", "bytes", "spaces"])
@given(words=WORDS, size=st.integers(2, 30))
def test_every_word_is_in_one_block_and_one_word_more_would_not_fit(reader: Any, words: list[str], size: int) -> None:
    blocks = list(token_blocks(words, reader, size))
    assert [word for block in blocks for word in block] == words
    start = 0
    for block in blocks:
        start += len(block)
        assert len(block) == 1 or tokens(block, reader) <= size
        if start < len(words):
            assert tokens([*block, words[start]], reader) > size or len(block) == size


def test_blocks_of_wikitext_count_a_checkpoints_tokens(invented: Path, tmp_path: Path) -> None:
    learned_pieces(spaced=False).save_pretrained(tmp_path / "checkpoint")
    own = {"tokenizer": str(tmp_path / "checkpoint"), "block": 16}
    blocks, whole = list(wikitext(str(invented), **own)), list(wikitext(str(invented)))
    for article in {row["article"] for row in whole}:
        texts = [" ".join(row["text"] for row in rows if row["article"] == article) for rows in (blocks, whole)]
        assert texts[0] == texts[1]
    counts = [tokens([row["text"]], TOKENIZERS[2]) for row in blocks]
    assert 10 < max(counts) <= 16
    assert label_of("wikitext", own).endswith("block 16, tokenizer checkpoint)"), "no path of this machine"
    hub = {"tokenizer": "some/where", "tokenizer_revision": "abc", "block": 16}
    assert label_of("wikitext", hub).endswith("block 16, tokenizer some/where, tokenizer_revision abc)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokenizer": "nowhere/at/all", "block": 8}, "'nowhere/at/all' is not a local folder, and its revision ''"),
        ({"tokenizer": "a/b", "tokenizer_revision": "main", "block": 8}, "its revision 'main' is not a commit"),
        ({"tokenizer": str(Path(__file__).parent), "block": 8}, "tokenizer .* cannot be loaded"),
        ({"tokenizer": "some/where"}, "tokenizer is given without block"),
        ({"tokenizer_revision": "abc", "block": 8}, "tokenizer_revision is given without tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(invented: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        next(iter(wikitext(str(invented), **options)))
