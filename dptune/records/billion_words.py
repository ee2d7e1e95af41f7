"""Sentences, or blocks of them, of the One Billion Word benchmark (Chelba et al. 2013), from a local copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dptune.core.errors import ConfigError
from dptune.records.published_files import read_published

_TRAIN, _HELD_OUT = "news.en-{:05d}-of-00100", "news.en.heldout-{:05d}-of-00050"
_MOST_FILES = {"train": 99, "dev": 49, "test": 1}


def billion_words(path: str, part: str = "train", files: int = 1, block: int = 0) -> Iterator[Mapping[str, Any]]:
    """Texts of the benchmark as published: words and marks with a space between, sentences in a shuffled order.

    No sentence belongs to a person or a document here, so that a record is the only unit: a sentence, or a block. A
    sentence that is left out of the files moves the borders of all later blocks.

    Args:
        path: the unpacked folder, with training-monolingual.tokenized.shuffled and heldout-monolingual... in it.
        part: train (news.en-00001 and on), test (held-out file 0), or dev (held-out file 1 and on).
        files: number of files to read: train has 99, dev 49, test 1.
        block: 0 yields sentences; else runs of whole sentences with at most so many words, one sentence at least.

    Raises: ConfigError for arguments that do not fit; DataError for files that cannot be read.
    """
    most = _MOST_FILES.get(part)
    if most is None:
        fix = f"use {', '.join(_MOST_FILES)}"
        raise ConfigError("data.options", f"billion_words has no part {part!r} here", fix=fix)
    for name, number, least in (("files", files, 1), ("block", block, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ConfigError("data.options", f"{name} {number!r} is not a number from {least}", fix=f"use {least}")
    if files > most:
        raise ConfigError("data.options", f"files {files}: part {part} has {most}", fix=f"use at most {most}")
    first = 0 if part == "test" else 1
    form = _TRAIN if part == "train" else _HELD_OUT
    names = [form.format(number) for number in range(first, first + files)]
    sentences = (line.strip() for name in names for line in read_published(path, name).split("\n") if line.strip())
    for text in _blocks(sentences, block) if block else sentences:
        yield {"text": text}


def _blocks(sentences: Iterator[str], size: int) -> Iterator[str]:
    held: list[str] = []
    words = 0
    for sentence in sentences:
        length = len(sentence.split())
        if held and words + length > size:
            yield " ".join(held)
            held, words = [], 0
        held.append(sentence)
        words += length
    if held:
        yield " ".join(held)
