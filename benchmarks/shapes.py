"""The sizes of work that steps are measured at: a model's shape, a batch, a width. Weights and records are random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

from dptune.core.settings import Lora
from dptune.training.data import Tokens, with_context
from dptune.training.models.model import attach_lora, fuse_activations

#: Records that Poisson batches are drawn from, in batches.
POISSON_BATCHES = 16
LORA = Lora(rank=8, alpha=16, dropout=0.0)


def _gpt2(**changes: Any) -> GPT2Config:
    # No dropout, which the private step refuses in the base: then all contenders compute the same.
    return GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **changes)


def _llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, **changes)


#: By name. "default" is what `make repro` trains (`pretrain` in params.yaml).
MODELS: dict[str, Callable[[], Any]] = {
    "default": lambda: _gpt2(vocab_size=1024, n_positions=192, n_embd=64, n_layer=2, n_head=2),
    "GPT-2-small": lambda: _gpt2(),
    "Llama-3.2-1B": lambda: _llama(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
    ),
    "all-MiniLM-L6-v2": lambda: BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "SmolLM2-135M": lambda: _llama(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    ),
    "tiny GPT-2": lambda: _gpt2(vocab_size=97, n_positions=64, n_embd=16, n_layer=2, n_head=2),
    "tiny Llama": lambda: _llama(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    ),
}


@dataclass(frozen=True)
class Shape:
    """One size of work.

    Attributes:
        model: key of ``MODELS``.
        batch: records of an optimiser step.
        tokens: width of every batch.
        physical: rows of a micro-batch.
        dtype: of the frozen weights; adapters are float32.
        autocast: "bfloat16" runs the forward pass in it; None is float32.
    """

    model: str
    batch: int
    tokens: int
    physical: int
    dtype: str = "float32"
    autocast: str | None = None

    @property
    def classifies(self) -> bool:
        """Whether the model has a head for two labels, which trains beside the adapters; else it writes."""
        return isinstance(MODELS[self.model](), BertConfig)

    @property
    def name(self) -> str:
        """For tables and ``--shape``."""
        return f"{self.model} {self.autocast or self.dtype} {self.batch}x{self.tokens}"


@dataclass(frozen=True)
class Setting:
    """A shape on a device."""

    shape: Shape
    device: torch.device

    def base(self, ours: bool = True) -> Any:
        """The frozen model, the same one at every call; with ``ours`` as ``models.model.load_base`` has it."""
        torch.manual_seed(0)
        with torch.device(self.device):
            kind = AutoModelForSequenceClassification if self.shape.classifies else AutoModelForCausalLM
            base = kind.from_config(MODELS[self.shape.model](), dtype=getattr(torch, self.shape.dtype)).requires_grad_(
                False
            )
        return fuse_activations(base) if ours else base

    def model(self, moved: bool = False, ours: bool = False) -> Any:
        """The model with its adapters, the same one at every call; ``moved`` takes B away from zero."""
        head = ("classifier",) if self.shape.classifies else ()
        model = attach_lora(self.base(ours), LORA, init_seed=0, head=head).train()
        if moved:
            for parameter in trainable(model):
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    @cached_property
    def records(self) -> Tokens:
        """A batch of random records, half to three quarters as long as the batch is wide."""
        return self.more_records(1)

    @cached_property
    def poisson_records(self) -> Tokens:
        """What batches of the same expected size are drawn from."""
        return self.more_records(POISSON_BATCHES)

    def more_records(self, times: int) -> Tokens:
        """``times`` batches of records; a classifier's end with their label."""
        generator, width = np.random.default_rng(0), self.shape.tokens
        vocabulary = MODELS[self.shape.model]().vocab_size
        lengths = generator.integers(width // 2, 3 * width // 4 + 1, size=times * self.shape.batch)
        rows = [generator.integers(1, vocabulary, size=n).astype(np.int32) for n in lengths]
        if self.shape.classifies:
            labels = generator.integers(2, size=len(rows))
            rows = [
                with_context(np.append(row, label).astype(np.int32), np.arange(len(row) + 1) == len(row))
                for row, label in zip(rows, labels, strict=True)
            ]
        return Tokens(rows, 0, width)

    def micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and mask of each part of the batch, as the private step cuts it."""
        rows = self.shape.physical
        for start in range(0, self.shape.batch, rows):
            yield self.records.batch(np.arange(start, min(start + rows, self.shape.batch)), self.device, height=rows)

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        dtype = getattr(torch, self.shape.autocast) if self.shape.autocast else None
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def smallest(self) -> Setting:
        """The same kind of work with hardly any of it."""
        return replace(self, shape=replace(self.shape, model="tiny GPT-2", batch=2, physical=2, tokens=16))


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What the optimiser moves, in model order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
