"""Classifiers of texts: an encoder or a causal model with a new head, of which the checkpoint knows nothing.

The classes are transformers' own, so that PEFT loads adapter and head again: ``AutoModelForSequenceClassification``;
or, for a checkpoint of sentence-transformers that takes the mean of its tokens' states for a text's vector,
``AutoModelForTokenClassification``, whose logits ``losses.label_logits`` averages over the tokens. The head is linear,
so that this is its answer to the mean state (ModernBERT has frozen layers before it that are not, for each token). Such
a checkpoint never trained the state of its first token, which the other class reads: a ridge on frozen states of
all-MiniLM-L6-v2 reaches 81.5 % of SST-2's dev set by the mean, and 76.7 % by the other.

What a checkpoint lacks is the head, and trains in full; everything else is frozen.

Label words: a causal model that classifies by its own logits of one word for each label (Schick and Schuetze 2021).

The logits of a few words are the last state times those words' rows of the output layer. So the model is transformers'
own sequence classifier on the causal model's layers, with those rows as its head, frozen: no weight is new, adapters
alone train, and every mechanism takes it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.utils import cached_file

from dptune.core.errors import ConfigError, first_line
from dptune.core.files import read_json
from dptune.training.models.causal import (
    architectures_of,
    check_configuration,
    check_embeddings,
    check_shapes,
    plain_tokens,
)
from dptune.training.models.memory import check_memory
from dptune.training.models.model import ModelSource, check_device, fuse_activations, load_base, no_memory
from dptune.training.models.model_source import named_as
from dptune.training.models.quantization import is_trainable, method_of
from dptune.training.models.weight_files import Stored, check_enough, check_finite, check_layers, stored_weights

_FIELD = "model.source"
_FIX = "give a BERT, RoBERTa, DistilBERT, ModernBERT or a causal language model"
_OTHER_TASK = re.compile(r"Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|RewardModel")
#: Modules of transformers' classifiers that no checkpoint of a language model has.
_HEADS = ("pre_classifier", "classifier", "score")
_POOLER = "pooler"
_POOLING = "label_pooling"  # dptune's own entry of a configuration
_MODULES = "modules.json"  # a checkpoint of sentence-transformers lists there what it does with the states


def load_classifier_config(
    base: ModelSource, labels: Collection[str], padding: int | None, *, mean: bool | None = None
) -> Any:
    """The configuration of a classifier on a checkpoint's model; no weights are read.

    Args:
        labels: names of the labels, in the order of the logits.
        padding: the tokenizer's padding token, after which a causal model's last token is found.
        mean: whether the head reads the mean of the tokens' states; None asks the checkpoint (``declares_mean``).

    Raises: ConfigError if it cannot be had, or the model has no such form, or is one already, or is an
        encoder-decoder, or is quantised.
    """
    try:
        config = AutoConfig.from_pretrained(base.location, revision=base.revision, trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(base, error) from error
    architectures = architectures_of(base.source, config)
    kind = f"{base.source!r} ({', '.join(architectures) or config.model_type})"
    if any(_OTHER_TASK.search(name) for name in architectures):
        problem = f"{kind} has the head of another task already, which would be lost"
        raise ConfigError(_FIELD, problem, fix=f"{_FIX}, before it was tuned for a task")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(_FIELD, f"{kind} is an encoder-decoder, which is not supported", fix=_FIX)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(_FIELD, f"{kind} has no form with a classification head", fix=_FIX)
    if not is_trainable(config):
        problem = f"{kind} holds quantised weights ({method_of(config)}), on which dptune does not train"
        raise ConfigError(_FIELD, problem, fix="give the checkpoint before quantisation, or model.dtype: bfloat16")
    if method_of(config) is not None or base.load_in_4bit:
        problem = "a head on weights in 4 bits, or otherwise quantised, is not supported"
        raise ConfigError("model.load_in_4bit", problem, fix="leave it out, or use model.dtype: bfloat16")
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    if padding is not None:
        config.get_text_config().pad_token_id = padding
    vars(config).pop(_POOLING, None)  # of an encoder that was saved after dptune had put a head on it
    if type(config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING and (declares_mean(base) if mean is None else mean):
        setattr(config, _POOLING, "mean")
    return config


def declares_mean(base: ModelSource) -> bool:
    """Whether a checkpoint of sentence-transformers says that the mean of its tokens' states is a text's vector.

    Raises: DamagedFileError for a file that says so and is torn; ConfigError for one that names a folder elsewhere.
    """
    modules = _declared(base, _MODULES, list) or []
    poolings = [one for one in modules if isinstance(one, dict) and str(one.get("type", "")).endswith(".Pooling")]
    found = [_declared(base, _within(base, one.get("path", "")), dict) or {} for one in poolings]
    return any(one.get("pooling_mode_mean_tokens") is True or one.get("pooling_mode") == "mean" for one in found)


def _within(base: ModelSource, folder: Any) -> str:
    """The name of the configuration in a folder that ``modules.json`` names. Raises: ConfigError unless it lies within
    the checkpoint: another file of this machine would decide what is trained."""
    place = PurePosixPath(folder) if isinstance(folder, str) else PurePosixPath("/")
    if place.is_absolute() or ".." in place.parts:
        problem = f"{base.source}/{_MODULES} names {folder!r}, which is not a folder of this checkpoint"
        raise ConfigError(_FIELD, problem, fix="copy or download the checkpoint again")
    return str(place / "config.json")


def _declared(base: ModelSource, name: str, kind: type[Any]) -> Any:
    """The content of a JSON file of a checkpoint; None where it has no such file, or none can be reached."""
    quiet = ("gated_repo", "missing_entries", "connection_errors")
    options = {f"_raise_exceptions_for_{one}": False for one in quiet}
    found = cached_file(base.location, name, revision=base.revision, **options)
    return None if found is None else read_json(Path(found), lambda content: content, kind=kind, fix="copy it again")


def classifier_class(config: Any) -> Any:
    """transformers' automatic class that loads the classifier of a configuration."""
    return AutoModelForTokenClassification if takes_mean(config) else AutoModelForSequenceClassification


def takes_mean(config: Any) -> bool:
    """Whether the head of a configuration reads the mean of the tokens' states."""
    return getattr(config, _POOLING, None) == "mean"


def described_head(head: tuple[str, ...], config: Any) -> str:
    """The modules of a head, and what it reads where that is the mean of the tokens' states."""
    mean = ", on the mean of the tokens' states, as the checkpoint declares"
    return ", ".join(head) + (mean if takes_mean(config) else "")


def empty_classifier(base: ModelSource, config: Any) -> Any:
    """The classifier of a configuration with no memory behind its weights. Raises: ConfigError if there is none."""
    check_layers(base.source, config, stored_weights(base.location, base.revision))
    try:
        with no_memory():
            model = classifier_class(config).from_config(config, dtype=getattr(torch, base.dtype))
    except Exception as error:
        raise _not_loaded(base, error) from error
    check_embeddings(base.source, model)
    return model.requires_grad_(False)


def head_names(base: ModelSource, model: Any) -> tuple[str, ...]:
    """The modules of a classifier that its checkpoint lacks, in model order: they are the head.

    A BERT that was saved as a masked language model lacks its pooler, which then belongs to the head.

    Raises: ConfigError if there is no head, or the checkpoint's weights cannot be had.
    """
    names = [name for name, _ in model.named_modules() if name in _HEADS]
    if not names:
        raise ConfigError(_FIELD, f"{type(model).__name__} has no head that dptune knows", fix=_FIX)
    poolers = [name for name, module in model.named_modules() if _is_pooler(name, module)]
    if poolers and not any(".pooler." in f".{key}" for key in _stored(base)):
        names = [*poolers, *names]
    return tuple(names)


def _is_pooler(name: str, module: torch.nn.Module) -> bool:
    return name.rpartition(".")[2] == _POOLER and any(True for _ in module.parameters())


def _stored(base: ModelSource) -> dict[str, Stored]:
    """The checkpoint's tensors by name, which are downloaded if need be. Raises: ConfigError as ``stored_weights``."""
    if not Path(base.location).is_dir():
        try:
            cached_file(base.location, "model.safetensors", revision=base.revision)
        except Exception as error:
            raise _not_loaded(base, error) from error
    return stored_weights(base.location, base.revision)


def load_classifier(base: ModelSource, config: Any, head: tuple[str, ...], device: torch.device) -> Any:
    """The classifier on its device, every weight frozen; its head holds random numbers until ``start_head``.

    Raises: ConfigError if the checkpoint cannot be had, lacks other weights than the head's, or holds weights of the
        transformer that the classifier has no place for.
    """
    check_device(device)
    asked = sum(weight.numel() for weight in empty_classifier(base, config).parameters())
    check_enough(base.source, asked, stored_weights(base.location, base.revision))
    check_memory(base.source, asked * getattr(torch, base.dtype).itemsize)
    try:
        model, report = classifier_class(config).from_pretrained(
            base.location,
            revision=base.revision,
            config=config,
            dtype=getattr(torch, base.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else it names none of them
        )
    except Exception as error:  # transformers raises any type for a broken checkpoint
        stored_weights(base.location, base.revision)  # names a file that was downloaded just now
        raise _not_loaded(base, error) from error
    check_classifier_weights(base.source, model, head, report)
    check_finite(base.source, model, stored_weights(base.location, base.revision))
    return named_as(base, fuse_activations(model.to(device).requires_grad_(False)))


def check_classifier_weights(
    source: str, model: Any, head: tuple[str, ...], report: Mapping[str, Collection[Any]]
) -> None:
    """Refuse a checkpoint that lacks more than the head, or holds weights that the transformer has no place for.

    Args:
        report: as for ``causal.check_weights``.

    Raises: ConfigError naming one of the weights.
    """
    check_shapes(source, report["mismatched_keys"])
    absent = sorted(map(str, report["missing_keys"]))
    missing = [name for name in absent if not any(name.startswith(f"{one}.") for one in head)]
    if missing:
        problem = f"{source!r} lacks weights of {type(model).__name__}, which would be random ({missing[0]})"
        raise ConfigError(_FIELD, problem, fix=f"{_FIX}, with all its weights")
    inside = f"{model.base_model_prefix}."
    lost = [key for key in map(str, report["unexpected_keys"]) if key.startswith(inside) and ".pooler." not in key]
    if lost:
        problem = f"{source!r} holds weights that {type(model).__name__} would lose ({sorted(lost)[0]})"
        raise ConfigError(_FIELD, problem, fix=_FIX)


def _not_loaded(base: ModelSource, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):  # of a GGUF file, which is converted when it is first read
        return error
    problem = f"{base.source!r} cannot be loaded as a classifier ({first_line(error)})"
    return ConfigError(_FIELD, problem, fix="check the name, revision, files and network")


_WORDS = "task.words"
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
            raise ConfigError(_WORDS, f"{word!r} is {len(ids)} tokens of this model's tokenizer{parts}", fix=fix)
        if (token := int(ids[0])) in found:
            problem = f"two of the words are the same token ({found[token]!r} and {word!r})"
            raise ConfigError(_WORDS, problem, fix="give each label a word of its own")
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
        raise ConfigError(_WORDS, f"need a causal language model, and {error.problem}", fix=fix) from None
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
        raise ConfigError(_WORDS, problem, fix="leave the words out, and train a head")
