"""The base model, by pinned revision or from a local directory, and the LoRA adapters on it."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoTokenizer
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from dptune.core.errors import ConfigError, DivergedError, first_line
from dptune.core.files import naming
from dptune.core.settings import Lora
from dptune.training.gradients.parameter_groups import PairModules, lora_pairs, trained_blocks
from dptune.training.losses import is_classifier, reads_mean
from dptune.training.models.causal import (
    auto_class,
    check_causal,
    check_configuration,
    check_embeddings,
    check_reads,
    check_weights,
)
from dptune.training.models.memory import check_memory
from dptune.training.models.model_names import name_of
from dptune.training.models.model_source import ModelSource as ModelSource
from dptune.training.models.model_source import named_as
from dptune.training.models.quantization import check_library, in_4bit, keep_layout, loading_options, states_of
from dptune.training.models.trained_layers import (
    HeadModules,
    beside_words,
    keep_in_float32,
    layers_to_name,
    linear_layers,
    lora_targets,
    start_head,
)
from dptune.training.models.weight_files import (
    UndrawnWeights,
    check_enough,
    check_finite,
    check_layers,
    report_of,
    stored_weights,
    unused_layers,
)

#: Heads that PEFT trains and saves by itself where the task is SEQ_CLS or TOKEN_CLS.
_ADDED_BY_PEFT = ("classifier", "score")
_log = logging.getLogger(__name__)


#: The fix that errors state for a run whose weights are no longer finite.
DIVERGED = "lower training.learning_rate; a run with other settings spends its own budget, and this one's stays spent"


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

    Raises: ConfigError if the checkpoint cannot be had, is damaged, or is no causal language model, or there is no such
        device; the message says why, and names the file.
    """
    check_device(device)
    if not sys.stderr.isatty():
        disable_progress_bar()
    config = load_config(base)
    quantised = in_4bit(base, config)
    asked = sum(weight.numel() for weight in without_weights(base, config).parameters())
    check_enough(base.source, asked, stored_weights(base.location, base.revision))
    if not quantised:
        check_memory(base.source, asked * getattr(torch, base.dtype).itemsize)
    try:
        model, report = auto_class(config).from_pretrained(
            base.location,
            revision=base.revision,
            dtype=getattr(torch, base.dtype),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else it names none of them
            **(loading_options(base, torch.device(device)) if quantised else {}),
        )
    except Exception as error:  # transformers raises any type for a broken checkpoint
        stored_weights(base.location, base.revision)  # names a file that was downloaded just now
        raise _not_loaded(base, error) from error
    check_weights(base.source, model, report)
    check_finite(base.source, model, stored_weights(base.location, base.revision))
    # On its device before adapters are attached: attaching first is known to corrupt LoRA updates silently.
    model = fuse_activations((keep_layout(model) if quantised else model.to(device)).requires_grad_(False))
    check_causal(base.source, model)
    return named_as(base, model)


def load_config(base: ModelSource) -> Any:
    """The configuration of a causal language model; no weights are read.

    Raises: ConfigError if it cannot be had, or is that of another kind of model, or of quantised weights that cannot be
        read here.
    """
    try:
        config = AutoConfig.from_pretrained(base.location, revision=base.revision, trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(base, error) from error
    check_configuration(base.source, config)
    if in_4bit(base, config):
        check_library()
    return config


@contextmanager
def no_memory() -> Iterator[None]:
    """Context in which models are built with no memory behind their weights (device "meta")."""
    with torch.device("meta"), UndrawnWeights():
        yield


def without_weights(base: ModelSource, config: Any) -> Any:
    """The model of a configuration with all its layers and no memory behind them (device "meta").

    Raises: ConfigError if the configuration describes no model, or one without token embeddings, or calls a decoder an
        encoder-decoder, which then writes nothing.
    """
    check_layers(base.source, config, stored_weights(base.location, base.revision))
    try:
        with no_memory():
            model = auto_class(config).from_config(config, dtype=getattr(torch, base.dtype), trust_remote_code=False)
    except Exception as error:
        raise _not_loaded(base, error) from error
    check_embeddings(base.source, model)
    if getattr(model.config, "is_encoder_decoder", False):  # the decoder half of BART says no, whatever its file says
        problem = f"{base.source}/config.json: is_encoder_decoder is true, and {type(model).__name__} has no encoder"
        raise ConfigError("model.source", problem, fix="set it to false, or give the config.json of these weights")
    return model.requires_grad_(False)


def check_headers(base: ModelSource, empty: Any, check: Callable[[Mapping[str, Any]], None]) -> tuple[str, ...]:
    """Check by their headers, within a second, that a checkpoint's files hold the weights of a model.

    Args:
        empty: the model, see ``without_weights``.
        check: called with the loading info that transformers would give.

    Returns: a note about whole layers that the files hold and the model lacks; some good checkpoints have such.

    Raises: ConfigError for what ``load_base`` would refuse after a minute; nothing is asked of files not downloaded.
    """
    stored = stored_weights(base.location, base.revision)
    check_enough(base.source, sum(weight.numel() for weight in empty.parameters()), stored)
    if in_4bit(base, empty.config) or (report := report_of(empty, stored)) is None:
        return ()
    check(report)
    check_finite(base.source, empty, stored)  # it has no numbers: their types alone
    if not (unused := unused_layers(empty, report["unexpected_keys"])):
        return ()
    layers = getattr(empty.config.get_text_config(), "num_hidden_layers", "fewer")
    return (
        f"{name_of(base.source)} holds {len(unused)} weights of layers that are not used, because its config.json "
        f"asks for "
        f"{layers} ({unused[0]}): unless they are to be left out, it is not the config.json of these weights",
    )


def _not_loaded(base: ModelSource, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):  # of a GGUF file, which is converted when it is first read
        return error
    problem = f"{base.source!r} cannot be loaded ({first_line(error)})"
    here = "check its config.json and the files beside it; or copy or download it again"
    fix = here if Path(base.source).is_dir() else "check the name, revision, files and network"
    return ConfigError("model.source", problem, fix=fix)


def fuse_activations(model: Any) -> Any:
    """Replace GPT-2's activation by one kernel: written out in eight, it takes a third of a step on a CPU."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    return model


def load_tokenizer(base: ModelSource) -> Any:
    """The checkpoint's tokenizer, with a padding token. Raises: ConfigError for one that makes no token of any text."""
    tokenizer = AutoTokenizer.from_pretrained(base.location, revision=base.revision, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_reads(tokenizer)
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
        targets = beside_words(model, targets)
    if head:
        start_head(model, head, init_seed)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(init_seed)
        config = LoraConfig(
            task_type=_task_of(model, head),
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
        layers = linear_layers(model)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:  # some layers are wrapped by then
            fix = layers_to_name(layers, model.config.model_type)
            raise ConfigError("lora.target_modules", first_line(error), fix=fix) from error
    if not head:
        _check_matched(lora, lora_pairs(adapted))
        return adapted
    blocks = trained_blocks(adapted)
    _check_matched(lora, [block for block in blocks if isinstance(block, PairModules)])
    for block in blocks:
        if isinstance(block, HeadModules):
            keep_in_float32(block)
    return adapted


def _task_of(model: Any, head: tuple[str, ...]) -> str | None:
    """PEFT's name of the task; None for a classifier by label words, whose class is dptune's own."""
    if head:
        return "TOKEN_CLS" if reads_mean(model) else "SEQ_CLS"
    return None if is_classifier(model) else "CAUSAL_LM"


def _check_matched(lora: Lora, pairs: Sequence[PairModules]) -> None:
    """Raise ConfigError for a pattern that no adapted layer matches, which PEFT ignores, and for two with different
    numbers that match one layer: PEFT takes the first, and neither cells' names nor saved adapters keep an order.
    """
    names = [pair.name.removeprefix("base_model.model.") for pair in pairs]
    for name in ("rank_pattern", "alpha_pattern"):
        numbers: dict[str, tuple[str, int]] = {}
        for key, number in getattr(lora, name).items():
            matched = [layer for layer in names if re.match(rf"(.*\.)?({key})$", layer)]
            if not matched:
                adapted = ", ".join(sorted({layer.rpartition(".")[2] for layer in names}))
                raise ConfigError(f"lora.{name}", f"no adapted layer is called {key!r}", fix=f"name some of {adapted}")
            for layer in matched:
                other, its = numbers.setdefault(layer, (key, number))
                if its != number:
                    problem = f"layer {layer} matches {other!r}: {its} and {key!r}: {number}"
                    raise ConfigError(f"lora.{name}", problem, fix="change a key, so that each layer matches one")


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
    """Every weight that trains moved, is finite, and no frozen weight changed.

    Args:
        initial: CPU copies of the weights that must have moved, by name.

    Raises: DivergedError for weights that are not finite or that no update moved; RuntimeError for a frozen weight that
        changed.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not torch.isfinite(parameter).all():
            raise DivergedError(f"weight {name} is not finite after training. Fix: {DIVERGED}.")
        if name in initial and torch.equal(parameter.detach().cpu(), initial[name]):
            problem = f"weight {name} did not move: the update never reached it, or is too small for its dtype"
            raise DivergedError(f"{problem}. Fix: raise the learning rate.")
    assert_frozen(model, fingerprint)


def assert_frozen(model: torch.nn.Module, fingerprint: str) -> None:
    """Raise RuntimeError for a frozen weight that changed during training."""
    if frozen_fingerprint(model) != fingerprint:
        raise RuntimeError("a frozen weight changed during training")


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """CPU copies of the weights that train, by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapter so that ``PeftModel.from_pretrained(base, directory)`` loads it: no card, and no path of this
    machine."""
    for config in model.peft_config.values():
        if config.base_model_name_or_path:
            config.base_model_name_or_path = name_of(config.base_model_name_or_path)
    # "auto" would ask the hub whether the vocabulary was resized.
    with naming(directory):
        model.save_pretrained(str(directory), safe_serialization=True, save_embedding_layers=False)
    (directory / "README.md").unlink()  # PEFT's blank form, which says nothing of this model
