"""Models and records so small that a step takes milliseconds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from dptune.core.settings import Lora
from dptune.privacy.entropy import Entropy, OsEntropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_header import RunHeader
from dptune.training.data import Tokens, with_context
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import TrainingPlan

torch.set_num_threads(1)  # so small that a second thread only waits for the first

VOCABULARY = 97
CPU = torch.device("cpu")
#: Where the tests of training have their models: DPTUNE_TEST_DEVICE=cuda asks for a GPU (docs/howto/gpu.md).
DEVICE = torch.device(os.environ.get("DPTUNE_TEST_DEVICE", "cpu"))


def gpt2(seed: int = 0, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).requires_grad_(False).to(DEVICE)


_GROUPED_QUERIES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(seed: int = 0, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_GROUPED_QUERIES)).requires_grad_(False).to(DEVICE)


def mistral(seed: int = 0, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    config = MistralConfig(num_hidden_layers=layers, sliding_window=4, **_GROUPED_QUERIES)
    return MistralForCausalLM(config).requires_grad_(False).to(DEVICE)


FAMILIES = {"gpt2": gpt2, "llama": llama, "mistral": mistral}


def adapted(family: str = "gpt2", *, randomised: bool = False, dropout: float = 0.0, **options: Any) -> Any:
    """A model with adapters; ``randomised`` also moves B away from zero, so that A has a gradient."""
    model = attach_lora(FAMILIES[family](**options), Lora(rank=4, alpha=8, dropout=dropout), init_seed=7)
    if randomised:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def records(count: int = 8, seed: int = 0, longest: int = 12) -> Tokens:
    """Random records of different lengths; token 0 pads."""
    generator = np.random.default_rng(seed)
    rows = [
        generator.integers(1, VOCABULARY, size=generator.integers(3, longest + 1)).astype(np.int32)
        for _ in range(count)
    ]
    return Tokens(rows=rows, padding=0, width=longest + 2)


def with_prompts(tokens: Tokens) -> Tokens:
    """The same records, of which the first tokens are only read: none, some, or (of every fourth) all."""
    rows = []
    for number, row in enumerate(tokens.rows):
        prompt = (0, 1, len(row) // 2, len(row))[number % 4]
        rows.append(with_context(row, np.arange(len(row)) >= prompt))
    return replace(tokens, rows=rows)


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainable(model).items()}


def row_loss(model: Any, row: Any) -> torch.Tensor:
    """The loss of one unpadded record, written down a second time; tokens that are only read are negative."""
    signed = torch.from_numpy(np.asarray(row, dtype=np.int64)).to(next(model.parameters()).device)
    ids, labels = signed.where(signed >= 0, ~signed)[None], signed.where(signed >= 0, -100)
    logits = model(input_ids=ids, use_cache=False).logits
    total = cross_entropy(logits[0, :-1].float(), labels[1:], reduction="sum")
    return total / max(1, int((labels[1:] >= 0).sum()))


def row_gradient(model: Any, row: Any) -> torch.Tensor:
    """The gradient of one record over all adapter weights, A and B of each pair in turn, by plain autograd."""
    gradients = torch.autograd.grad(row_loss(model, row), list(trainable(model).values()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def each_record(tokens: Tokens) -> PrivacyUnits:
    return PrivacyUnits.of("record", np.arange(len(tokens.rows)), 1)


def make_plan(of: int = 8, **changes: Any) -> TrainingPlan:
    """A schedule for ``of`` units."""
    values = {
        "sample_rate": 0.5,
        "expected_batch_size": of * changes.get("sample_rate", 0.5),
        "steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "checkpoint_every": 2,
    }
    return TrainingPlan(**(values | changes))


def make_header(entropy: Entropy | None = None, of: PrivacyUnits | None = None, **changes: Any) -> RunHeader:
    values = {
        "mechanism": "static",
        "published_accountant": "gdp_clt",
        "accounting": "certified",
        "epsilon": None,
        "delta": 1e-5,
        "unit": of.kind if of else "record",
        "units": len(of) if of else 8,
        "leaks": (entropy or OsEntropy()).leaks,
    }
    return RunHeader(**(values | changes))


def close(ledger: Ledger) -> Ledger:
    ledger.close()
    return ledger


def release_lines(directory: Path) -> int:
    """Releases on the disk, counted without the library."""
    path = directory / "ledger.jsonl"
    return path.read_bytes().count(b'"kind":"release"') if path.exists() else 0
