"""Paragraphs, blocks and cleaned articles of WikiText-2 (Merity et al. 2016)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.records.published_files import check_known, file_of, hub_rows, read_published
from dptune.records.reading.source import COMMIT

Row = Mapping[str, Any]
_WIKITEXT = {"train": "wiki.train.tokens", "dev": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_BLANK = " \n"
_HEADING = re.compile(r" = [^=](.*[^=])? = ")
#: What stands for a character within a word in the file, and spaces that the file has and a text has not.
_WITHIN_WORDS = re.compile(r" @([-,.])@ ")
_NO_SPACE_BEFORE, _NO_SPACE_AFTER = re.compile(r" ([.,;:!?%)\]]|'s\b|n't\b)"), re.compile(r"([(\[£$]) ")
_HEADING_MARKS = re.compile(r"^(= )+|( =)+$")


def wikitext(
    path: str,
    part: str = "train",
    half: str = "all",
    block: int = 0,
    tokenizer: str = "",
    tokenizer_revision: str = "",
    revision: str = "",
) -> Iterator[Row]:
    """Texts of WikiText-2: columns text and article, a hash of the whole article.

    Args:
        path: wikitext-2-v1.zip, or the folder of its files; on the hub, Salesforce/wikitext, say.
        part: train, dev or test.
        half: "public" or "private": the articles whose hash begins with an even or an odd byte; or "all".
        block: 0 yields paragraphs; else blocks of so many words of one article (the file's own words), the last one
            shorter. A word is about 1.2 of GPT-2's tokens.
        tokenizer: a checkpoint's folder, or its name on the hub: ``block`` then counts its tokens, and a block holds as
            many whole words as fit. The papers' blocks of 512 tokens run across articles, and belong to no one article.
        tokenizer_revision: the commit of that checkpoint on the hub.
        revision: the commit of a data set on the hub, which ``path`` then names.

    Raises: ConfigError for arguments that do not fit; DataError for files that cannot be read.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 0:
        raise ConfigError("data.options", f"block {block!r} is not a number of words", fix="use 0, or 100, say")
    if tokenizer and not block:
        raise ConfigError("data.options", "tokenizer is given without block", fix="give block too, such as 512")
    if tokenizer_revision and not tokenizer:
        raise ConfigError("data.options", "tokenizer_revision is given without tokenizer", fix="name the tokenizer")
    read = load_fast_tokenizer(tokenizer, tokenizer_revision) if tokenizer else None
    for article in _of_half(path, part, half, revision):
        name = hashlib.sha256("".join(article).encode()).hexdigest()[:16]
        pieces = [line.strip() for line in article if line.strip()]
        if block:
            words = " ".join(pieces).split()
            pieces = [" ".join(some) for some in (token_blocks(words, read, block) if read else _parts(words, block))]
        for text in pieces:
            yield {"text": text, "article": name}


def cleaned_articles(path: str, part: str = "train", half: str = "all") -> list[str]:
    """One text for each article, as people write: for public models that are to see other texts afterwards.

    Unknown words are left out, marks within words are undone (``10 @-@ year``, ``3 @.@ 5``), and so are most spaces
    that stand around punctuation. A model that is scored on WikiText reads ``wikitext`` instead.
    """
    return ["\n".join(filter(None, map(_clean, article))) for article in _of_half(path, part, half)]


def _of_half(path: str, part: str, half: str, revision: str = "") -> Iterator[list[str]]:
    if half not in ("all", "public", "private"):
        raise ConfigError("data.options", f"half {half!r} is unknown", fix="use all, public or private")
    file = file_of("wikitext", _WIKITEXT, part)
    for article in articles(_of_hub(path, revision, part, file) if revision else read_published(path, file)):
        first = hashlib.sha256("".join(article).encode()).digest()[0]
        if half == "all" or (first % 2 == 0) == (half == "public"):
            yield article


def _of_hub(name: str, revision: str, part: str, file: str) -> str:
    """The published file: the hub has a row for each of its lines, and nothing for a blank one."""
    rows = hub_rows(name, revision, part, ("text",), "wikitext-2-v1")
    content = "".join(row["text"] or _BLANK for row in rows)
    check_known(file, content.encode(), name)
    return content


def _parts(words: list[str], size: int) -> Iterator[list[str]]:
    return (words[start : start + size] for start in range(0, len(words), size))


def _clean(line: str) -> str:
    text = " ".join(_HEADING_MARKS.sub("", line.strip()).replace("<unk>", " ").split())
    text = _WITHIN_WORDS.sub(r"\1", text)
    return _NO_SPACE_AFTER.sub(r"\1", _NO_SPACE_BEFORE.sub(r"\1", text))


def articles(content: str) -> list[list[str]]:
    """The lines of each article: it begins at a level-1 heading that stands between blank lines."""
    lines = content.split("\n")
    blank = [not line.strip() for line in lines]
    starts = [
        number
        for number, line in enumerate(lines)
        if _HEADING.fullmatch(line)
        and (number == 0 or blank[number - 1])
        and (number + 1 == len(lines) or blank[number + 1])
    ]
    ends = [*starts[1:], len(lines)]
    return [[f"{line}\n" for line in lines[start:end]] for start, end in zip(starts, ends, strict=True)]


# Cuts a text's words into blocks of at most so many tokens of a tokenizer, which a model then reads whole.


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
