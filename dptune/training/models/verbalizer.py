"""Label words: a causal model that classifies by its own logits of one word for each label (Schick and Schuetze 2021).

The logits of a few words are the last state times those words' rows of the output layer. So the model is transformers'
own sequence classifier on the causal model's layers, with those rows as its head, frozen: no weight is new, adapters
alone train, and every mechanism takes it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from dptune.core.errors import ConfigError
from dptune.training.models.causal import check_configuration, plain_tokens
from dptune.training.models.classifier import empty_classifier, load_classifier_config
from dptune.training.models.model import ModelSource, load_base

_FIELD = "task.words"
#: Number of tokens of the probe, and how far its logits may differ, as a share of the largest.
_PROBE, _ROUNDING = 6, 1e-3


def word_tokens(words: Sequence[str], tokenizer: Any) -> list[int]:
    """The id of each word, which must be one token. Raises: ConfigError naming a word that is not."""
    found: dict[int, str] = {}
    for word in words:
        ids = tokenizer(word, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) != 1:
            fix = "give words that are one token each; most begin with a space"
            parts = f" ({', '.join(repr(tokenizer.decode([token])) for token in ids)})" if len(ids) else ""
            raise ConfigError(_FIELD, f"{word!r} is {len(ids)} tokens of this model's tokenizer{parts}", fix=fix)
        if (token := int(ids[0])) in found:
            problem = f"two of the words are the same token ({found[token]!r} and {word!r})"
            raise ConfigError(_FIELD, problem, fix="give each label a word of its own")
        found[token] = word
    return list(found)


def cut_at_beginning(tokenizer: Any) -> Any:
    """A copy that cuts a text that is too long at its beginning: the words follow the text's end."""
    found = copy.deepcopy(tokenizer)
    found.truncation_side = "left"
    return found


def load_verbalizer_config(base: ModelSource, labels: Sequence[str], words: Sequence[str], tokenizer: Any) -> Any:
    """The configuration of the classifier of label words; no weights are read. See ``load_verbalizer``.

    Raises: ConfigError for an encoder or another model that is not causal, and for a word of several tokens.
    """
    config = load_classifier_config(base, labels, tokenizer.pad_token_id, mean=False)
    try:
        check_configuration(base.source, config)
    except ConfigError as error:
        fix = "leave the words out, and train a head; or give a causal language model, such as GPT-2"
        raise ConfigError(_FIELD, f"need a causal language model, and {error.problem}", fix=fix) from None
    word_tokens(words, tokenizer)
    return config


def load_verbalizer(
    base: ModelSource, labels: Sequence[str], words: Sequence[str], tokenizer: Any, device: torch.device
) -> Any:
    """The classifier of label words on its device, every weight frozen; it reads a text, and says the next word.

    Args:
        labels: names of the labels, in the order of the logits.
        words: for each label a word that is one token, such as " good".
        tokenizer: the model's, with a padding token, after which the text's last token is found.

    Raises: ConfigError for a word of several tokens, an encoder, a model in 4 bits, and one whose logits are more than
        its output layer on its last state.
    """
    config = load_verbalizer_config(base, labels, words, tokenizer)
    ids = word_tokens(words, tokenizer)
    causal = load_base(base, device)
    model = empty_classifier(base, config)
    setattr(model, model.base_model_prefix, getattr(causal, causal.base_model_prefix))
    output = causal.get_output_embeddings()
    model.score = torch.nn.Linear(
        output.weight.shape[1], len(ids), bias=False, device=device, dtype=output.weight.dtype
    )
    with torch.no_grad():
        model.score.weight.copy_(output.weight[ids])
    model = model.requires_grad_(False).eval()
    _check_same(base.source, model, causal.eval(), ids)
    return model


@torch.no_grad()
def _check_same(source: str, model: Any, causal: Any, words: Sequence[int]) -> None:
    """Refuse a family that scales, caps or shifts its logits: the classifier's would be others."""
    tokens = plain_tokens(causal)[:_PROBE].to(next(causal.parameters()).device)[None]
    seen = torch.ones_like(tokens)
    own = causal(input_ids=tokens, attention_mask=seen, use_cache=False).logits[0, -1, list(words)].float()
    found = model(input_ids=tokens, attention_mask=seen).logits[0].float()
    if not torch.allclose(found, own, atol=float(own.abs().max()) * _ROUNDING):
        problem = f"{source!r} does more to its logits than its output layer, so words are not read off its states"
        raise ConfigError(_FIELD, problem, fix="leave the words out, and train a head")
