"""Checks that a checkpoint is a causal language model: by its configuration, its weights and its logits.

Transformers loads an encoder, the decoder half of a translation model or a classifier as a causal model without an
error. Position t of an encoder sees token t + 1, so that its perplexity means nothing; a classifier loses its head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from dptune.core.errors import ConfigError, first_line
from dptune.training.models.quantization import is_trainable, method_of

_FIELD = "model.source"
_FIX = "give a causal language model, such as GPT-2, Llama or Mistral"
_OTHER_TASK = re.compile(r"Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|RewardModel")
#: Number of tokens of the probe, and the share of the largest logit that may be rounding, in units of the dtype's eps.
_PROBE, _ROUNDING = 8, 4
_SOME = 3
#: The exponential of a larger mean loss is infinite in float64.
_MOST_LOSS = 709
#: Names that families give to the most tokens of a text; the second is MPT's.
_WIDTHS = ("max_position_embeddings", "max_seq_len")


def check_configuration(source: str, config: Any) -> None:
    """Refuse by name what is no causal language model, before its weights are read.

    Raises: ConfigError for a classifier, an encoder, an encoder-decoder, a model of another kind, or weights that are
        quantised by another method than bitsandbytes' 4 bits.
    """
    architectures = architectures_of(source, config)
    kind = f"{source!r} ({', '.join(architectures) or config.model_type})"
    if any(_OTHER_TASK.search(name) for name in architectures):
        problem = f"{kind} is a classification checkpoint, whose head would be lost"
        raise ConfigError(_FIELD, problem, fix=_FIX)
    loaded = _name_in(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if getattr(config, "is_encoder_decoder", False) and loaded not in architectures:
        raise ConfigError(_FIELD, f"{kind} is an encoder-decoder, whose encoder would be lost", fix=_FIX)
    if loaded is None and auto_class(config) is AutoModelForCausalLM:
        raise ConfigError(
            _FIELD, f"{kind} is not a causal language model: {config.model_type} has no such form", fix=_FIX
        )
    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes:
        problem = f"{kind} is an encoder: each of its positions sees the tokens after it"
        raise ConfigError(_FIELD, problem, fix=f"{_FIX}; encoders take task classify")
    if not is_trainable(config):
        problem = f"{kind} holds quantised weights ({method_of(config)}), on which dptune does not train"
        fix = "give the checkpoint before quantisation, with model.load_in_4bit, or model.dtype: bfloat16"
        raise ConfigError(_FIELD, problem, fix=fix)


def architectures_of(source: str, config: Any) -> tuple[str, ...]:
    """The classes that a checkpoint says it is of. transformers hands on whatever config.json holds there.

    Raises: ConfigError for a list of anything but names, and for a text model that is no configuration.
    """
    found, text = getattr(config, "architectures", None) or (), config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        problem = f"{source}/config.json: text_config is {text!r}, not a configuration of a model"
    elif not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        problem = f"{source}/config.json: architectures is {found!r}, not a list of names"
    else:
        return tuple(found)
    raise ConfigError(_FIELD, problem, fix="give the config.json that save_pretrained wrote")


def check_weights(source: str, model: Any, report: Mapping[str, Collection[Any]]) -> None:
    """Refuse a checkpoint that left weights of the model at random, or had weights that the model has no place for.

    A checkpoint of the model's own class may hold more than it needs: buffers that older releases saved.

    Args:
        report: the loading info of ``from_pretrained(output_loading_info=True)``.

    Raises: ConfigError naming some of the weights.
    """
    check_shapes(source, report["mismatched_keys"])
    if missing := sorted(map(str, report["missing_keys"])):
        problem = f"{source!r} lacks weights of {type(model).__name__}, which would be random ({_some(missing)})"
        raise ConfigError(_FIELD, problem, fix=f"{_FIX}, whole")
    lost, named = sorted(map(str, report["unexpected_keys"])), getattr(model.config, "architectures", None) or ()
    if lost and type(model).__name__ not in named:
        problem = f"{source!r} holds weights that {type(model).__name__} would lose ({_some(lost)})"
        raise ConfigError(_FIELD, problem, fix=_FIX)


def check_embeddings(source: str, model: Any) -> None:
    """Raise ConfigError for a model without a table of token embeddings, such as CANINE, which reads characters."""
    try:
        model.get_input_embeddings().weight  # noqa: B018 (whatever it raises)
    except (NotImplementedError, AttributeError) as error:
        problem = f"{source!r} ({type(model).__name__}) has no table of token embeddings"
        fix = "give a model that reads the tokens of a vocabulary, such as BERT, GPT-2 or Llama"
        raise ConfigError(_FIELD, problem, fix=fix) from error


def check_shapes(source: str, mismatched: Collection[Any]) -> None:
    """Raise ConfigError for weights of other shapes than config.json asks for: they would be random.

    Args:
        mismatched: name, shape in the file and shape in the model of each.
    """
    for name, stored, asked in sorted(mismatched, key=str):
        others = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        problem = (
            f"{source!r} holds {name} of shape {tuple(stored)}, and its config.json asks for {tuple(asked)}{others}"
        )
        raise ConfigError(_FIELD, problem, fix="give config.json and weights of the same model")


@torch.no_grad()
def check_causal(source: str, model: Any) -> None:
    """Run the model on a few tokens, and change those from position t on, for every t: no logits before t may move.

    Eight positions, not all: every position needs a row of its own, which at full length is as dear as the evaluation
    of a thousand records. What is loaded by mistake (an encoder, a prefix or blockwise model, a mask that is missing)
    lets its first positions see ahead. Weights made so that only a later position does would pass: the guarantee does
    not rest on this check, but on each record's own loss; only the perplexity would mean less.

    Raises: ConfigError if they do, if the model cannot read tokens alone, or if its predictions are no use to train on:
        not finite, of an infinite perplexity, or the same whatever it reads.
    """
    width = min(_PROBE, most_positions(model) or _PROBE)
    ids = _probe(model, width)
    try:
        with evaluation_mode(model):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    except Exception as error:  # whatever a model that is asked for less than it needs may raise
        problem = f"{source!r} cannot read a single text ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(_FIELD, problem, fix=f"{_FIX}; if it is one, mend its config.json") from error
    if not bool(torch.isfinite(logits).all()):
        problem = f"{source!r} ({type(model).__name__}) computes infinities or NaN for a short text in {logits.dtype}"
        fix = "check that its config.json and weights belong together, or give another dtype"
        raise ConfigError(_FIELD, problem.replace("torch.", ""), fix=fix)
    given = logits.double().log_softmax(-1)
    loss = -float(given[0, :-1].gather(-1, ids[0, 1:, None]).mean())
    useless = f"gives an infinite perplexity (a loss of {loss:.2g}) for a short text" if loss > _MOST_LOSS else ""
    if ids.min() < ids.max() and float((given[:, -1] - given[0, -1]).abs().max()) <= torch.finfo(torch.float32).eps:
        useless = "gives the same predictions for different texts"
    if useless:
        fix = "check that its config.json and weights belong together, and that the weights are not all zero"
        raise ConfigError(_FIELD, f"{source!r} ({type(model).__name__}) {useless}", fix=fix)
    allowed = _ROUNDING * torch.finfo(logits.dtype).eps * float(logits.abs().max())
    for position in range(1, width):
        moved = float((logits[position, :position].float() - logits[0, :position].float()).abs().max())
        if not moved <= allowed:  # nor a NaN
            problem = (
                f"{source!r} ({type(model).__name__}) is not causal: other tokens from position {position} on move its "
                f"predictions before them by {moved:.2g}, where rounding explains {allowed:.2g}"
            )
            raise ConfigError(_FIELD, problem, fix=_FIX)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode inside the context; restore each module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def plain_tokens(model: Any) -> torch.Tensor:
    """Ids of ordinary tokens: special ones, such as padding, change how some models count positions."""
    config = model.config.get_text_config()
    special = {value for name, value in config.to_dict().items() if name.endswith("_token_id") and type(value) is int}
    count = min(model.get_input_embeddings().weight.shape[0], config.vocab_size)
    return torch.tensor([token for token in range(count) if token not in special] or [0])


def _probe(model: Any, width: int) -> torch.Tensor:
    """(width, width) token ids on the model's device: row 0, and row t that differs from it from position t on."""
    tokens, generator = plain_tokens(model), torch.Generator().manual_seed(0)
    first, others = (tokens[torch.randint(len(tokens), (width,), generator=generator)] for _ in range(2))
    if len(tokens) > 1:
        others = torch.where(others == first, tokens[(torch.searchsorted(tokens, first) + 1) % len(tokens)], others)
    rows = torch.arange(width)[:, None]
    changed = (torch.arange(width) >= rows) & (rows > 0)
    return torch.where(changed, others, first).to(next(model.parameters()).device)


def most_positions(model: Any) -> int | None:
    """The most tokens that the model can read, by configuration and positions; None if it sets no bound."""
    config = model.config.get_text_config()
    found = [getattr(config, name, None) for name in _WIDTHS]
    for name, module in model.named_modules():  # RoBERTa counts positions from its padding token's number on
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and "position" in name:
            found.append(module.num_embeddings - module.padding_idx - 1)
    return min((width for width in found if isinstance(width, int) and width > 0), default=None)  # XLNet says -1


def auto_class(config: Any) -> Any:
    """transformers' automatic class for a checkpoint: that of texts and images if the checkpoint is of such a class.

    An adapter's keys are then the names of layers by which serving tools know the checkpoint.
    """
    own, causal = (
        _name_in(known, config) for known in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    )
    is_own = own is not None and own in (getattr(config, "architectures", None) or ())
    return AutoModelForImageTextToText if is_own and own != causal else AutoModelForCausalLM


def _name_in(known: Any, config: Any) -> str | None:
    """The name of a configuration's class in a mapping of transformers; None where it has none."""
    return str(known[type(config)].__name__) if type(config) in known else None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SOME} more" if len(names) > _SOME else ""
    return ", ".join(names[:_SOME]) + more


# The token before a text: from it a causal model learns, and draws, a text's first token.


_BOS = "add_bos_token"
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
        raise ConfigError(_BOS, "the tokenizer has neither such a token nor one of the end", fix="leave it out")
    found.add_bos_token = True
    if list(found("a", verbose=False)["input_ids"]) != [found.bos_token_id, *before]:
        problem = f"the tokenizer ({type(tokenizer).__name__}) does not take it"
        raise ConfigError(_BOS, problem, fix="leave it out, or save a tokenizer that puts one in the model's folder")
    return found
