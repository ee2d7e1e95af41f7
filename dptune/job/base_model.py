"""Checks a base model without reading its weights: configuration, tokenizer, context length and target modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from dptune.core.errors import ConfigError, first_line
from dptune.core.settings import Lora, TrainedWeights
from dptune.job.delivery.weights import NamedBase
from dptune.job.path_checks import check_model
from dptune.job.settings import JobSettings
from dptune.training.gradients.parameter_groups import PairModules
from dptune.training.gradients.shared_pass import shared_copy
from dptune.training.gradients.step_memory import layers_of
from dptune.training.losses import is_classifier
from dptune.training.models.causal import (
    auto_class,
    check_causal,
    check_configuration,
    check_embeddings,
    check_reads,
    check_weights,
    most_positions,
    with_beginning,
)
from dptune.training.models.classifier import (
    check_classifier_weights,
    classifier_class,
    cut_at_beginning,
    empty_classifier,
    head_names,
    load_classifier,
    load_classifier_config,
    load_verbalizer,
    load_verbalizer_config,
    takes_mean,
)
from dptune.training.models.memory import check_memory, sizes_of, smaller_forms
from dptune.training.models.model import (
    ModelSource,
    check_device,
    check_headers,
    frozen_fingerprint,
    load_base,
    load_config,
    load_tokenizer,
    without_weights,
)
from dptune.training.models.model_names import is_packaged, name_of, rounding
from dptune.training.models.own_weights import groups_of, own_weights, start_training
from dptune.training.models.quantization import METHOD, keep_layout, method_of
from dptune.training.models.trained_layers import linear_layers, said_share
from dptune.training.models.weight_files import check_finite, digest_of_weights

_MIB = 2**20
_PIECES, _PIECE = 1024, 4096  # of a file of weights: 4 MiB in all


@dataclass(frozen=True)
class Base:
    """A base model that passed all checks; its weights are read by ``load``. Public.

    Attributes:
        name: a hub id, a package, or the last part of a path, so that no path of this machine is handed on.
        revision: the commit of a hub id, or the version of a package; None for a folder or a GGUF file.
        identity: digest of configuration and weights' files, by which a resumed run recognises the model.
        device: the device that it runs on.
        parameters: number of parameters of the frozen model, which take ``frozen_bytes`` bytes together.
        bytes_each: bytes of a number that passes through the model.
        quantization: how the weights are held, such as "bitsandbytes (4 bit)"; None where each is a number of its own.
        positions: the most tokens of a text; None if the model sets no bound.
        layers, width, vocabulary: sizes of the transformer, for estimates.
        pair_sizes: number of parameters of each group that trains: of each LoRA pair and of a classifier's head, or of
            each layer whose own weights train.
        adapted: how many of the model's linear layers are adapted, or of its weights train, in words.
        loaded_by: transformers' automatic class that loads the checkpoint, by name.
        notes: sentences that the user should read, such as one about a missing padding token.
        checkpoint: where ``load`` reads the weights; None for a loaded model.
        loaded_model: the transformers model that was given instead of a checkpoint; None for a checkpoint.
        classifier: configuration of the classifier, whose ``head`` names the modules that train in full; None for a
            causal language model.
        words: word of each label of a classifier by label words, in the order of the logits; it has no head.
        kind: GGML's name of the type of most weights of a GGUF file, such as "Q4_1"; None for other models.
        trained: the weights that train.
        smaller: bytes of the frozen weights of a checkpoint if they were held in fewer bits, by setting.
    """

    name: str
    revision: str | None
    identity: str
    lora: Lora
    tokenizer: Any = field(repr=False)
    device: torch.device
    parameters: int
    frozen_bytes: float
    bytes_each: int
    quantization: str | None
    positions: int | None
    layers: int
    width: int
    vocabulary: int
    pair_sizes: tuple[int, ...]
    adapted: str
    loaded_by: str
    notes: tuple[str, ...]
    checkpoint: ModelSource | None
    loaded_model: Any = field(repr=False)
    classifier: Any = field(default=None, repr=False)
    head: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    trained: TrainedWeights = field(default_factory=TrainedWeights)
    smaller: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> str | None:
        """What the card says of the frozen weights: a GGUF file's rounding, "bfloat16", or 4 bits; None for float32."""
        held = self.quantization or ("bfloat16" if self.bytes_each == 2 else None)
        return ", held as ".join(filter(None, (self.kind and rounding(self.kind), held))) or None

    def check_memory(self) -> None:
        """Raise ConfigError, before a record is read, if the weights of a checkpoint do not fit in memory."""
        in_4bit, base = self.quantization is not None, self.checkpoint
        if base is not None and not (in_4bit and self.device.type != "cpu"):  # those are read right into the GPU's
            check_memory(base.source, self.frozen_bytes, self.smaller)

    @cached_property
    def named(self) -> NamedBase:
        """What is delivered of it. For a checkpoint this reads all weights once, so a dry run does without it:
        ``identity`` is a digest of pieces of them."""
        if self.checkpoint is None:
            dtype = str(self.loaded_model.get_input_embeddings().weight.dtype).removeprefix("torch.")
            held = "4 bits" if self.quantization else dtype
            return NamedBase(self.name, None, self.identity, held)
        checkpoint = self.checkpoint
        digest = checkpoint.file_digest or digest_of_weights(checkpoint.source, checkpoint.revision)
        return NamedBase(self.name, self.revision, digest, kind=self.kind)

    @property
    def pairs(self) -> int:
        """Number of groups that train."""
        return len(self.pair_sizes)

    @property
    def dimension(self) -> int:
        """Number of parameters of all of them."""
        return sum(self.pair_sizes)

    def load(self) -> Any:
        """The frozen model on its device. A model that was given stays as it is: adapters go on a copy of its layers.

        Raises: ConfigError if the checkpoint's weights cannot be had, or are those of another kind of model.
        """
        if self.checkpoint is not None and self.words:
            labels, words = list(self.words), list(self.words.values())
            return load_verbalizer(self.checkpoint, labels, words, self.tokenizer, self.device)
        if self.checkpoint is not None and self.classifier is not None:
            return load_classifier(self.checkpoint, self.classifier, self.head, self.device)
        if self.checkpoint is not None:
            return load_base(self.checkpoint, self.device)
        model = keep_layout(shared_copy(self.loaded_model))
        check_finite(self.name, model)
        check_causal(self.name, model)
        return model

    def start(self, seed: int, weights: Any = None) -> Any:
        """The model as training starts, private or not: new adapters on it, or its own weights made trainable.

        Args:
            seed: public seed of the initial weights of adapters and head.
            weights: what ``load`` returned, or a copy that shares its weights; None loads it.

        Raises: ConfigError as ``load`` and ``start_training``.
        """
        frozen = self.load() if weights is None else weights
        return start_training(frozen, self.trained, self.lora, seed, self.head)


def open_base(model: Any, settings: JobSettings, revision: str | None = None, tokenizer: Any = None) -> Base:
    """Check a model and its tokenizer within seconds.

    Args:
        model: a hub id (with ``revision``), a folder, a GGUF file, ``package:NAME``, or a transformers model, which
            then must be frozen and needs ``tokenizer``.

    Raises: ConfigError naming what is missing: files, a causal form, target modules, padding.
    """
    if settings.task == "classify" and not isinstance(model, str | Path):
        problem = "is a loaded model, but a classifier needs a checkpoint"
        raise ConfigError("model", problem, fix="give its folder, or a hub id")
    if isinstance(model, str | Path):
        device = check_device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        half = device.type == "cuda" and settings.train == "lora"  # what trains needs all digits
        dtype = settings.dtype or ("bfloat16" if half else "float32")
        checkpoint = ModelSource(check_model(str(model), revision), revision, dtype, settings.load_in_4bit)
        labels = settings.labels if settings.task == "classify" else None
        config = load_config(checkpoint) if labels is None else None
        tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(checkpoint)
        check_reads(tokenizer)
        tokenizer = with_beginning(tokenizer) if settings.add_bos_token else tokenizer
        head: tuple[str, ...] = ()
        words = {label: settings.words[label] for label in labels} if labels and settings.words else {}
        if labels is None:
            empty = without_weights(checkpoint, config)
        elif words:
            config = load_verbalizer_config(checkpoint, labels, list(words.values()), tokenizer)
            tokenizer = cut_at_beginning(tokenizer)
            empty = empty_classifier(checkpoint, config)
        else:
            config = load_classifier_config(checkpoint, labels, tokenizer.pad_token_id)
            empty = empty_classifier(checkpoint, config)
            head = head_names(checkpoint, empty)
            tokenizer = deepcopy(tokenizer)
            # Training pads right, so the delivered tokenizer does too. Padding on the left would move an encoder's
            # first token, which the label is read from, and GPT-2's positions.
            tokenizer.padding_side = "right"
        if settings.gradient_checkpointing:
            layers_of(empty)
        name, unused = name_of(checkpoint.source), _check_files(checkpoint, empty, head)
        revision, kind = checkpoint.revision, checkpoint.kind
        found = _describe_base(empty, empty, name, revision, "", settings, tokenizer, device, checkpoint, head)
        identity = _identity_of(checkpoint, config)
        found = replace(found, identity=identity, notes=(*found.notes, *unused), kind=kind)
        return found if labels is None else replace(found, classifier=config, vocabulary=len(labels), words=words)
    if tokenizer is None:
        raise ConfigError("tokenizer", "is missing", fix="give the tokenizer that belongs to the loaded model")
    check_reads(tokenizer)
    tokenizer = with_beginning(tokenizer) if settings.add_bos_token else tokenizer
    if getattr(model, "config", None) is None or getattr(model, "peft_config", None):
        problem = f"is a {type(model).__name__}"
        raise ConfigError("model", problem, fix="give a transformers model without adapters, a folder or a hub id")
    device = next(model.parameters()).device
    source = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    check_configuration(source, model.config)
    check_embeddings(source, model)
    trainable = [parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point()]
    if any(trainable) and not all(trainable):  # somebody chose some of them
        problem = "has some weights that train, and the setting train says which do"
        raise ConfigError("model", problem, fix="call model.requires_grad_(False)")
    model.requires_grad_(False)
    if settings.gradient_checkpointing:
        layers_of(model)
    identity, name = frozen_fingerprint(model), Path(source).name
    return _describe_base(model, shared_copy(model), name, None, identity, settings, tokenizer, device, None)


def _check_files(checkpoint: ModelSource, empty: Any, head: tuple[str, ...]) -> tuple[str, ...]:
    """Notes about the checkpoint's files. Raises: ConfigError if their headers show that ``Base.load`` would."""
    if head:
        return check_headers(
            checkpoint, empty, lambda report: check_classifier_weights(checkpoint.source, empty, head, report)
        )
    causal = without_weights(checkpoint, load_config(checkpoint)) if is_classifier(empty) else empty
    return check_headers(checkpoint, causal, lambda report: check_weights(checkpoint.source, causal, report))


def _describe_base(
    model: Any,
    copy: Any,
    name: str,
    revision: str | None,
    identity: str,
    settings: JobSettings,
    tokenizer: Any,
    device: torch.device,
    checkpoint: ModelSource | None,
    head: tuple[str, ...] = (),
) -> Base:
    """The ``Base`` of ``model``. What trains is made trainable in ``copy``, which shares its weights, to count it."""
    config, rows = model.config.get_text_config(), model.get_input_embeddings().weight.shape[0]
    quantization = method_of(model.config)
    if checkpoint is not None and checkpoint.load_in_4bit:
        quantization = f"{METHOD} (4 bit)"
    parameters, frozen = sizes_of(model, quantised=quantization is not None and checkpoint is not None)
    forms: dict[str, float] = {}  # weights that train need all their digits
    if checkpoint is not None and quantization is None and settings.train == "lora":
        gguf, classifies = checkpoint.kind is not None, settings.task == "classify"
        forms = smaller_forms(model, checkpoint.dtype, gguf=gguf, head=classifies)
    linear = [layer for layer in linear_layers(copy) if not layer.startswith(head)]  # adapters are linear layers too
    trained = start_training(copy, settings.trained, settings.lora, 0, head)
    blocks = groups_of(trained)
    adapted = [block.name.removeprefix("base_model.model.") for block in blocks if isinstance(block, PairModules)]
    sizes = tuple(block.size for block in blocks)
    if own_weights(trained):
        said = f"{sum(sizes):,} of the model's {parameters:,} weights, in {len(sizes)} layers"
    else:
        said = said_share(model, adapted, linear)
    return Base(
        name=name,
        revision=revision,
        identity=identity,
        lora=settings.lora,
        tokenizer=tokenizer,
        device=device,
        parameters=parameters,
        frozen_bytes=frozen,
        bytes_each=model.get_input_embeddings().weight.element_size(),
        quantization=quantization,
        positions=most_positions(model),
        layers=int(config.num_hidden_layers),
        width=int(config.hidden_size),
        vocabulary=rows,
        pair_sizes=sizes,
        adapted=said,
        loaded_by=(classifier_class if head else auto_class)(model.config).__name__,
        notes=_checked_tokenizer(tokenizer, rows),
        checkpoint=checkpoint,
        loaded_model=None if checkpoint else model,
        head=head,
        trained=settings.trained,
        smaller=forms,
    )


def _tokenizer_of(checkpoint: ModelSource) -> Any:
    folder = Path(checkpoint.location)
    fix = "save the model's tokenizer in its folder, or give tokenizer"
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    bare = folder.is_dir() and not any((folder / name).is_file() for name in names)
    try:
        found = load_tokenizer(checkpoint)
    except Exception as error:  # a torn file makes the tokenizers library raise anything
        if isinstance(error, ConfigError) and not bare:
            raise
        why = f"of {checkpoint.source!r} cannot be loaded ({first_line(error)})"
        problem = f"{checkpoint.source!r} holds no tokenizer" if bare else why
        raise ConfigError("tokenizer", problem, fix=fix) from error
    # transformers makes one of an empty vocabulary; ByT5's reads bytes, and has none
    if bare and found.vocab_files_names:
        raise ConfigError("tokenizer", f"{checkpoint.source!r} holds no tokenizer", fix=fix)
    return found


def _checked_tokenizer(tokenizer: Any, rows: int) -> tuple[str, ...]:
    """Check a tokenizer, and return notes about it. One without a padding token pads with the end-of-text token."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        fix = "set tokenizer.pad_token or eos_token to one of its tokens, and save it again"
        raise ConfigError("tokenizer", "has neither a padding nor an end-of-text token", fix=fix)
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= rows:
        problem = f"has token {largest}, and the model knows {rows} tokens"
        fix = "give the tokenizer that belongs to this model, or resize_token_embeddings(len(tokenizer)) and save both"
        raise ConfigError("tokenizer", problem, fix=fix)
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        return ("the tokenizer has no padding token of its own: the end-of-text token pads, without loss",)
    return ()


def _identity_of(checkpoint: ModelSource, config: Any) -> str:
    """The commit of a hub id, the digest of a GGUF file, or one of a folder, wherever it lies."""
    if checkpoint.file_digest is not None:
        return checkpoint.file_digest
    if checkpoint.revision is not None and not is_packaged(checkpoint.source):
        # A head on the mean is another model: a run of an earlier version, or of a time when the hub could not be asked
        # what the checkpoint declares, does not go on with it.
        return f"{checkpoint.revision} mean" if takes_mean(config) else checkpoint.revision
    return _digest_of_folder(Path(checkpoint.location), config)


def _digest_of_folder(folder: Path, config: Any) -> str:
    """Digest of the configuration, and of each weight file's size, beginning, end and pieces in between.

    Reading billions of weights would take minutes. The path is left out: a run may go on from another directory.
    """
    shape = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    weights = []
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            parts = sha256(file.read(_MIB))
            for number in range(_PIECES):  # evenly spread, so that every layer of usual models has one
                file.seek(number * size // _PIECES)
                parts.update(file.read(_PIECE))
            file.seek(max(0, size - _MIB))
            parts.update(file.read(_MIB))
        weights.append((path.name, size, parts.hexdigest()))
    return sha256(json.dumps([shape, weights], sort_keys=True, default=str).encode()).hexdigest()
