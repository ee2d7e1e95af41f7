"""Classifiers of every supported family, so small that a step takes milliseconds, and labelled records for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny_models import VOCABULARY
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from dptune.core.settings import Lora
from dptune.training.data import Tokens, with_context
from dptune.training.models.classifier import classifier_class
from dptune.training.models.model import attach_lora

LABELS = 3
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
#: Modules of each family's head; a BERT without a pooler in its checkpoint trains that too.
HEADS: dict[str, tuple[str, ...]] = {
    "bert": ("classifier",),
    "bert without pooler": ("bert.pooler", "classifier"),
    "bert by the mean of its tokens": ("classifier",),
    "modernbert by the mean of its tokens": ("classifier",),
    "roberta": ("classifier",),
    "distilbert": ("pre_classifier", "classifier"),
    "modernbert": ("classifier",),
    "gpt2": ("score",),
    "llama": ("score",),
}


def configuration(family: str, labels: int = LABELS) -> Any:
    config = AutoConfig.for_model(family.split()[0], **_SIZES, pad_token_id=0)
    config.id2label = {number: f"label {number}" for number in range(labels)}
    if "mean" in family:
        config.label_pooling = "mean"
    return config


def classifier(family: str, labels: int = LABELS) -> Any:
    """The frozen model, whose weights are large enough for gradients to be more than rounding."""
    torch.manual_seed(0)
    config = configuration(family, labels)
    model = classifier_class(config).from_config(config).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model.eval()


def adapted_classifier(family: str, *, randomised: bool = True, seed: int = 7, **lora: Any) -> Any:
    """A classifier with adapters and head; ``randomised`` moves B and the biases away from zero."""
    model = attach_lora(classifier(family), Lora(rank=4, dropout=0.0, **lora), seed, HEADS[family])
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and randomised:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def labelled(count: int = 6, seed: int = 0, longest: int = 10) -> Tokens:
    """Random texts of 2 to ``longest`` tokens, each followed by its label; token 0 pads."""
    generator, rows = np.random.default_rng(seed), []
    for number in range(count):
        ids = generator.integers(3, VOCABULARY, size=generator.integers(2, longest + 1)).astype(np.int32)
        row = np.append(ids, number % LABELS).astype(np.int32)
        rows.append(with_context(row, np.arange(len(row)) == len(ids)))
    return Tokens(rows, padding=0, width=longest + 2)


def row_loss(model: Any, row: Any) -> torch.Tensor:
    """The loss of one unpadded record, written down a second time."""
    ids, label = torch.from_numpy(~row[:-1].astype(np.int64))[None], torch.tensor([int(row[-1])])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return cross_entropy(logits if logits.dim() == 2 else logits[0].mean(0, keepdim=True), label)


def row_gradient(model: Any, row: Any, parameters: list[torch.Tensor]) -> torch.Tensor:
    """The gradient of one record over ``parameters``, flat, by plain autograd."""
    return torch.cat([part.flatten() for part in torch.autograd.grad(row_loss(model, row), parameters)])
