"""The token before a text: from it a causal model learns, and draws, a text's first token.

GPT-2's and Qwen's tokenizers put none: the first token of a text has no loss then, and nothing says what texts begin
with.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from dptune.core.errors import ConfigError, first_line

_FIELD = "add_bos_token"
#: Made-up texts, of which each tokenizer knows some.
_TEXTS = ("a", "The 2nd of May, A-B.", "0 1 2", "ACGT", "数学", "Привет", "مرحبا")


def check_reads(tokenizer: Any) -> None:
    """Raise ConfigError for a tokenizer that fails over a text, or maps all to no token or to the same ones.

    It is tried on made-up texts alone.
    """
    fix = "mend its normalizer and vocabulary, or give the model's own"
    try:
        read = [list(tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]) for text in _TEXTS]
    except Exception as error:  # whatever the tokenizers library raises, such as for an unknown token that is missing
        problem = f"fails over made-up texts such as {_TEXTS[1]!r} ({first_line(error)})"
        raise ConfigError("tokenizer", problem, fix=fix) from error
    if not any(read):
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one where no file is found
            problem = "the tokenizer has no vocabulary: its files are missing, or hold none"
            raise ConfigError("tokenizer", problem, fix="save the model's own tokenizer in its folder")
        problem = f"maps made-up texts such as {_TEXTS[1]!r} to no token, so that nothing would be learned"
        raise ConfigError("tokenizer", problem, fix=fix)
    if all(ids == read[0] for ids in read):
        problem = (
            f"maps made-up texts such as {_TEXTS[0]!r} and {_TEXTS[1]!r} to the same tokens, so that nothing would "
        )
        raise ConfigError("tokenizer", f"{problem}be learned", fix=fix)


def beginning_of(tokenizer: Any) -> list[int]:
    """Ids of the special tokens that the tokenizer puts before a text; empty if it puts none."""
    whole, plain = (
        list(tokenizer("a", verbose=False, add_special_tokens=added)["input_ids"]) for added in (True, False)
    )
    place = next((start for start in range(len(whole)) if whole[start : start + len(plain)] == plain), 0)
    return whole[:place]


def with_beginning(tokenizer: Any) -> Any:
    """A copy that puts a beginning-of-text token before each text: its own, or else the end-of-text token.

    Raises: ConfigError for a tokenizer that has neither, or does not take transformers' setting ``add_bos_token``.
    """
    if beginning_of(tokenizer):
        return tokenizer
    found, before = deepcopy(tokenizer), list(tokenizer("a", verbose=False)["input_ids"])
    if found.bos_token is None:
        found.bos_token = found.eos_token
    if found.bos_token is None:
        raise ConfigError(_FIELD, "the tokenizer has neither such a token nor one of the end", fix="leave it out")
    found.add_bos_token = True
    if list(found("a", verbose=False)["input_ids"]) != [found.bos_token_id, *before]:
        problem = f"the tokenizer ({type(tokenizer).__name__}) does not take it"
        raise ConfigError(_FIELD, problem, fix="leave it out, or save a tokenizer that puts one in the model's folder")
    return found
