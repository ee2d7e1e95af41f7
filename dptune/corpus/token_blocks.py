"""Cuts a text's words into blocks of at most so many tokens of a tokenizer, which a model then reads whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dptune.corpus.reading.source import COMMIT
from dptune.errors import ConfigError


def load_fast_tokenizer(name: str, revision: str) -> Any:
    """A tokenizer of transformers that says where in the text each token begins.

    Args:
        name: a folder; or a name on the hub, of which ``revision`` is the commit.

    Raises: ConfigError for one that is not pinned, cannot be loaded, or does not say it.
    """
    from transformers import AutoTokenizer

    if not Path(name).is_dir() and not COMMIT.fullmatch(revision):
        problem = f"tokenizer {name!r} is not a local folder, and its revision {revision!r} is not a commit"
        raise ConfigError("data.options", problem, fix="give tokenizer_revision, its 40-digit commit")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or None, trust_remote_code=False)
    except Exception as error:  # whatever network, hub and library raise
        problem = f"tokenizer {name!r} cannot be loaded ({type(error).__name__})"
        raise ConfigError(
            "data.options", problem, fix="give a checkpoint's folder, or check name and revision"
        ) from error
    if not tokenizer.is_fast:
        problem = f"tokenizer {name!r} does not say where in a text its tokens begin"
        raise ConfigError("data.options", problem, fix="give one of the tokenizers library, or leave tokenizer out")
    return tokenizer


def token_blocks(words: list[str], tokenizer: Any, size: int) -> Iterator[list[str]]:
    """Blocks of whole words, each with as many as make at most ``size`` tokens; one word at least, however long.

    A block's tokens are counted as those of its own text, words with a space between, with what the tokenizer puts
    before or after it.
    """
    start = 0
    while start < len(words):
        some = words[start : start + size]  # a word has one token at least
        while len(some) > 1 and (over := _over(some, tokenizer, size)):
            some = some[:-over]
        yield some
        start += len(some)


def _over(words: list[str], tokenizer: Any, size: int) -> int:
    """How many words at the end to leave out, at least, for the tokens of the rest to fit; 0 if they do."""
    found = tokenizer(" ".join(words), return_offsets_mapping=True, truncation=False, verbose=False)
    tokens = len(found["input_ids"])
    if tokens <= size:
        return 0
    ends, whole = [end for _, end in found["offset_mapping"]], 0
    fit, length = max(ends[:size]), -1
    for word in words:
        length += 1 + len(word)
        whole += length <= fit
    return max(len(words) - max(whole, 1), 1)
