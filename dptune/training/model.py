"""The base model, by pinned revision or from a local directory, and the LoRA adapters on it."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.activations import NewGELUActivation
from transformers.utils.logging import disable_progress_bar

from dptune.errors import ConfigError

#: The query and value projections of every attention block, by model type (GPT-2 fuses q, k and v).
TARGET_MODULES = {"gpt2": ("c_attn",), "llama": ("q_proj", "v_proj"), "mistral": ("q_proj", "v_proj")}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModel:
    """Where the frozen weights come from.

    Attributes:
        source: a hub id or a local directory.
        revision: the 40-digit commit of a hub id; None for a directory.
        dtype: of the frozen weights, "float32" or "bfloat16".
    """

    source: str
    revision: str | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not Path(self.source).is_dir() and not (self.revision and _COMMIT.fullmatch(self.revision)):
            raise ConfigError(
                "model.revision",
                f"{self.source!r} is no local directory and its revision {self.revision!r} is no commit",
                fix="pin the hub model to a 40-digit commit, or give the path of a checkpoint",
            )


@dataclass(frozen=True)
class Lora:
    """LoRA hyper-parameters; ``target_modules`` None takes q and v of the model's family."""

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    target_modules: tuple[str, ...] | None = None


def load_base(base: BaseModel, device: torch.device) -> Any:
    """The causal language model on its device, every weight frozen.

    Only safetensors are read and no code from the checkpoint is run.

    Raises: ConfigError if the checkpoint cannot be had; the message says why.
    """
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base.source,
            revision=base.revision,
            dtype=getattr(torch, base.dtype),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            "model.source", f"{base.source!r} cannot be loaded ({error})", fix="check the name, revision and network"
        ) from error
    # On its device before adapters are attached: attaching first is known to corrupt LoRA updates silently.
    return fuse_activations(model.to(device).requires_grad_(False))


def fuse_activations(model: Any) -> Any:
    """The same model with GPT-2's activation as one kernel: written out in eight, it is a third of a step on a CPU."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, torch.nn.GELU(approximate="tanh"))
    return model


def load_tokenizer(base: BaseModel) -> Any:
    """The checkpoint's tokenizer, with a padding token."""
    tokenizer = AutoTokenizer.from_pretrained(base.source, revision=base.revision, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def attach_lora(model: Any, lora: Lora, init_seed: int) -> PeftModel:
    """LoRA adapters in float32 on the frozen model; the initialisation is public and reproducible.

    Raises: ConfigError for a model family without known q and v projections.
    """
    family = model.config.model_type
    targets = lora.target_modules or TARGET_MODULES.get(family)
    if targets is None:
        raise ConfigError(
            "lora.target_modules", f"not known for model type {family!r}", fix="name the q and v projections"
        )
    with torch.random.fork_rng(devices=_cuda_devices(model)):
        torch.manual_seed(init_seed)
        return get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(targets),
                fan_in_fan_out=family == "gpt2",
            ),
        )


def train_adapters(model: torch.nn.Module) -> None:
    """Adapters in training mode, the frozen model in evaluation mode.

    The base model's own dropout would draw masks over the whole batch, and adds nothing where it is frozen.
    """
    model.eval()
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            module.train()


def uses_dropout(model: torch.nn.Module) -> bool:
    """Whether the adapters drop anything."""
    return any(
        "lora_dropout" in name and isinstance(module, torch.nn.Dropout) and module.p > 0
        for name, module in model.named_modules()
    )


def freeze_down(model: torch.nn.Module) -> None:
    """Leave only the B factors to train (FFA-LoRA): B A is then linear in what is noised."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)


def frozen_fingerprint(model: torch.nn.Module) -> str:
    """A checksum that changes when any bit of a frozen weight does."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def assert_trained(model: torch.nn.Module, initial: dict[str, torch.Tensor], fingerprint: str) -> None:
    """Every adapter tensor moved, is finite, and no frozen weight changed.

    Raises: RuntimeError naming the first tensor that contradicts it.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not torch.isfinite(parameter).all():
            raise RuntimeError(f"adapter weight {name} is not finite after training")
        if torch.equal(parameter.detach().cpu(), initial[name]):
            raise RuntimeError(f"adapter weight {name} did not move: the update never reached it")
    if frozen_fingerprint(model) != fingerprint:
        raise RuntimeError("a frozen weight changed during training")


def trainable_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """CPU copies of the adapter weights by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(model: PeftModel, directory: Path) -> None:
    """Write the adapter so that ``PeftModel.from_pretrained(base, directory)`` loads it."""
    # "auto" would ask the hub whether the vocabulary was resized.
    model.save_pretrained(str(directory), safe_serialization=True, save_embedding_layers=False)


def _cuda_devices(model: Any) -> list[int]:
    device = next(model.parameters()).device
    return [device.index or 0] if device.type == "cuda" else []
