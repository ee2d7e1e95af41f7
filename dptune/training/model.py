"""The base model, by pinned revision or from a local directory, and the LoRA adapters on it."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGET_MODULES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from dptune.errors import ConfigError, DivergedError, first_line
from dptune.files import naming
from dptune.training.causal import check_causal, check_configuration, check_weights
from dptune.training.head import HeadModules, keep_in_float32, start_head
from dptune.training.lora import Lora
from dptune.training.losses import is_classifier
from dptune.training.per_sample import PairModules, lora_pairs, trained_blocks
from dptune.training.pinned import check_pinned
from dptune.training.quantized import check_library, in_4bit, keep_layout, loading_options, states_of

_LINEAR = (torch.nn.Linear, Conv1D)
#: Query and value projections of families that PEFT's own table lacks.
_NOT_IN_PEFT = {"distilbert": ["q_lin", "v_lin"], "modernbert": ["Wqkv"]}
#: Heads that PEFT trains and saves by itself where the task is SEQ_CLS.
_ADDED_BY_PEFT = ("classifier", "score")
#: The layer of a classifier by label words that holds the words' rows of the output layer: frozen, as those are.
_WORDS_LAYER = "score"
_log = logging.getLogger(__name__)


#: The fix that errors state for a run whose weights are no longer finite.
DIVERGED = "lower training.learning_rate; a run with other settings spends its own budget, and this one's stays spent"


@dataclass(frozen=True)
class ModelSource:
    """The source of the frozen weights.

    Attributes:
        source: a hub id or a local directory.
        revision: the 40-digit commit of a hub id; None for a directory.
        dtype: dtype of the frozen weights, "float32" or "bfloat16"; in 4 bits, of the products with them.
        load_in_4bit: hold the weights of linear layers in 4 bits (bitsandbytes' NF4).
    """

    source: str
    revision: str | None = None
    dtype: str = "float32"
    load_in_4bit: bool = False

    def __post_init__(self) -> None:
        check_pinned(self.source, self.revision)


def check_device(device: torch.device | str) -> torch.device:
    """Convert a device name, and check that this machine has the device, with float64, which noise and sums need.

    Raises: ConfigError if it does not.
    """
    try:
        return torch.empty(0, device=device, dtype=torch.float64).device
    except (RuntimeError, AssertionError, TypeError) as error:
        count = torch.cuda.device_count()
        known = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
        raise ConfigError("device", f"'{device}' cannot be used ({first_line(error)})", fix=f"use {known}") from None


def load_base(base: ModelSource, device: torch.device) -> Any:
    """The causal language model on its device, every weight frozen.

    Only safetensors are read and no code from the checkpoint is run.

    Raises: ConfigError if the checkpoint cannot be had, or is no causal language model, or there is no such device; the
        message says why.
    """
    check_device(device)
    if not sys.stderr.isatty():
        disable_progress_bar()
    quantised = in_4bit(base, load_config(base))
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            base.source,
            revision=base.revision,
            dtype=getattr(torch, base.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **(loading_options(base, torch.device(device)) if quantised else {}),
        )
    except Exception as error:  # transformers raises any type for a broken checkpoint
        raise _not_loaded(base, error) from error
    check_weights(base.source, model, report)
    # On its device before adapters are attached: attaching first is known to corrupt LoRA updates silently.
    model = fuse_activations((keep_layout(model) if quantised else model.to(device)).requires_grad_(False))
    check_causal(base.source, model)
    return model


def load_config(base: ModelSource) -> Any:
    """The configuration of a causal language model; no weights are read.

    Raises: ConfigError if it cannot be had, or is that of another kind of model, or of quantised weights that cannot be
        read here.
    """
    try:
        config = AutoConfig.from_pretrained(base.source, revision=base.revision, trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(base, error) from error
    check_configuration(base.source, config)
    if in_4bit(base, config):
        check_library()
    return config


def without_weights(base: ModelSource, config: Any) -> Any:
    """The model of a configuration with all its layers and no memory behind them (device "meta").

    Raises: ConfigError if the configuration describes no model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, base.dtype), trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(base, error) from error
    return model.requires_grad_(False)


def _not_loaded(base: ModelSource, error: Exception) -> ConfigError:
    problem = f"{base.source!r} cannot be loaded ({first_line(error)})"
    return ConfigError("model.source", problem, fix="check the name, revision, files and network")


def fuse_activations(model: Any) -> Any:
    """Replace GPT-2's activation by one kernel: written out in eight, it takes a third of a step on a CPU."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    return model


def load_tokenizer(base: ModelSource) -> Any:
    """The checkpoint's tokenizer, with a padding token."""
    tokenizer = AutoTokenizer.from_pretrained(base.source, revision=base.revision, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def attach_lora(model: Any, lora: Lora, init_seed: int, head: tuple[str, ...] = ()) -> PeftModel:
    """LoRA adapters in float32 on the frozen model; the initialisation is public and reproducible.

    Args:
        head: modules of a classifier that train in full beside the adapters, and are saved with them. They start from
            random numbers of the same seed, in float32.

    Raises: ConfigError for a model family whose layers PEFT does not know, for a name that no layer has, for a pattern
        that no adapted layer matches, and for a layer whose per-sample gradients are not supported (an embedding).
    """
    targets = lora_targets(model, lora)
    if is_classifier(model) and not head:
        targets = _beside_words(model, targets)
    if head:
        start_head(model, head, init_seed)
    with torch.random.fork_rng(devices=_cuda_devices(model)):
        torch.manual_seed(init_seed)
        config = LoraConfig(
            task_type="SEQ_CLS" if head else None if is_classifier(model) else "CAUSAL_LM",
            modules_to_save=[name for name in head if name not in _ADDED_BY_PEFT] or None,
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            use_rslora=lora.rslora,
            rank_pattern=dict(lora.rank_pattern),
            alpha_pattern=dict(lora.alpha_pattern),
            init_lora_weights=lora.init_lora_weights,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError("lora.target_modules", first_line(error), fix=_names_of_layers(model)) from error
    if not head:
        _check_matched(lora, lora_pairs(adapted))
        return adapted
    blocks = trained_blocks(adapted)
    _check_matched(lora, [block for block in blocks if isinstance(block, PairModules)])
    for block in blocks:
        if isinstance(block, HeadModules):
            keep_in_float32(block)
    return adapted


def _check_matched(lora: Lora, pairs: Sequence[PairModules]) -> None:
    """Raise ConfigError for a pattern that no adapted layer matches, which PEFT ignores."""
    names = [pair.name.removeprefix("base_model.model.") for pair in pairs]
    for name in ("rank_pattern", "alpha_pattern"):
        for key in getattr(lora, name):
            if not any(re.match(rf"(.*\.)?({key})$", layer) for layer in names):
                adapted = ", ".join(sorted({layer.rpartition(".")[2] for layer in names}))
                raise ConfigError(f"lora.{name}", f"no adapted layer is called {key!r}", fix=f"name some of {adapted}")


def lora_targets(model: Any, lora: Lora) -> list[str] | str:
    """The target modules to give to PEFT, each checked: PEFT ignores an unknown name if another one is known.

    Raises: ConfigError naming the layers that there are.
    """
    family = model.config.model_type
    targets = lora.target_modules or TARGET_MODULES.get(family) or _NOT_IN_PEFT.get(family)
    if targets is None:
        problem = f"not known for model type {family!r}"
        raise ConfigError("lora.target_modules", problem, fix=_names_of_layers(model))
    if lora.target_modules is None and isinstance(targets, str):
        return targets  # PEFT's own regular expression
    if targets in ("all-linear", ("all-linear",)):
        return "all-linear"
    if isinstance(targets, str):
        return _checked_expression(model, targets)
    layers = [f".{name}" for name, _ in model.named_modules()]
    for target in targets:
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise ConfigError("lora.target_modules", f"no layer is called {target!r}", fix=_names_of_layers(model))
    return list(targets)


def _beside_words(model: Any, targets: list[str] | str) -> list[str] | str:
    """The target modules without the words' layer, which PEFT takes for any other linear layer.

    Raises: ConfigError if they name it.
    """
    if targets == "all-linear":
        return [name for name, one in model.named_modules() if isinstance(one, _LINEAR) and name != _WORDS_LAYER]
    if re.fullmatch(targets, _WORDS_LAYER) if isinstance(targets, str) else _WORDS_LAYER in targets:
        problem = f"include {_WORDS_LAYER!r}, the label words' rows of the output layer, which stay frozen"
        raise ConfigError("lora.target_modules", problem, fix="leave it out")
    return targets


def _checked_expression(model: Any, expression: str) -> str:
    """A regular expression of layers' whole names. Raises: ConfigError if it is none, or matches no linear layer."""
    try:
        compiled = re.compile(expression)
    except re.error as error:
        raise ConfigError(
            "lora.target_modules", f"{expression!r} is no regular expression ({error})", fix="mend it"
        ) from None
    matched = [(name, module) for name, module in model.named_modules() if compiled.fullmatch(name)]
    other = next((name for name, module in matched if not isinstance(module, _LINEAR)), None)
    if other is not None or not matched:
        problem = f"as a regular expression of whole names, {expression!r} matches "
        problem += f"{other}, which is no linear layer" if other is not None else "no layer"
        example = next(name for name, module in model.named_modules() if isinstance(module, _LINEAR))
        fix = f"match whole names such as {example}, or give a list of names, or all-linear"
        raise ConfigError("lora.target_modules", problem, fix=fix)
    return expression


def _names_of_layers(model: Any) -> str:
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, _LINEAR)}
    listed = ", ".join(sorted(name for name in names if not name.isdigit()))
    return f"name its query and value projections, or other linear layers ({listed}), or write all-linear"


def train_adapters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, bool]]:
    """Adapters in training mode, the frozen model in evaluation mode.

    The base model's own dropout would draw masks over the whole batch, and is of no use in a frozen model.

    Returns: every module, and whether it is in training mode, for ``set_modes``.
    """
    model.eval()
    modes = [(module, "lora_dropout" in name) for name, module in model.named_modules()]
    set_modes(modes)
    return modes


def set_modes(modes: Iterable[tuple[torch.nn.Module, bool]]) -> None:
    """Put modules in their modes. At each step, for walking through a deep model again would take much longer."""
    for module, training in modes:
        if module.training != training:
            module.training = training


def uses_dropout(model: torch.nn.Module) -> bool:
    """Whether the adapters use dropout."""
    return any(
        "lora_dropout" in name and isinstance(module, torch.nn.Dropout) and module.p > 0
        for name, module in model.named_modules()
    )


def freeze_down(model: torch.nn.Module) -> None:
    """Leave only the B factors to train (FFA-LoRA): B A is then linear in the noisy weights."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)


def frozen_fingerprint(model: torch.nn.Module) -> str:
    """A checksum that changes when any bit of a frozen weight does."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            digest.update(_bytes_of(parameter))
            for part in states_of(parameter):  # of weights in 4 bits: their scales
                digest.update(_bytes_of(part))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def assert_trained(model: torch.nn.Module, initial: dict[str, torch.Tensor], fingerprint: str) -> None:
    """Every adapter tensor moved, is finite, and no frozen weight changed.

    Raises: DivergedError for adapter weights that are not finite or that no update moved; RuntimeError for a frozen
        weight that changed.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not torch.isfinite(parameter).all():
            raise DivergedError(f"adapter weight {name} is not finite after training. Fix: {DIVERGED}.")
        if torch.equal(parameter.detach().cpu(), initial[name]):
            problem = f"adapter weight {name} did not move: the update never reached it, or is too small for its dtype"
            raise DivergedError(f"{problem}. Fix: raise the learning rate.")
    if frozen_fingerprint(model) != fingerprint:
        raise RuntimeError("a frozen weight changed during training")


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """CPU copies of the adapter weights by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapter so that ``PeftModel.from_pretrained(base, directory)`` loads it."""
    # "auto" would ask the hub whether the vocabulary was resized.
    with naming(directory):
        model.save_pretrained(str(directory), safe_serialization=True, save_embedding_layers=False)


def _cuda_devices(model: Any) -> list[int]:
    device = next(model.parameters()).device
    return [device.index or 0] if device.type == "cuda" else []
