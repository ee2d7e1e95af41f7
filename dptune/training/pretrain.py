"""A small public base model: GPT-2's shape, its own tokenizer, trained on public narratives from scratch.

It stands in for a hub model where none can be downloaded. It never sees a private record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dptune.training.data import tokenize
from dptune.training.evaluation import perplexity
from dptune.training.model import fuse_activations
from dptune.training.plain import fit
from dptune.training.public_model import Pretraining

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges may span words but not sentences.

    A narrative is a list of stock sentences, so one clause becomes a few tokens and a record about eighty:
    five times fewer than GPT-2's, which is what lets two slow cores fine-tune. Any text can be encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^.]*\. ?"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def without_weights(plan: Pretraining) -> Any:
    """The layers of the model that ``pretrain`` makes, with no memory behind them (device "meta")."""
    with torch.device("meta"):
        return GPT2LMHeadModel(_configuration(plan, plan.vocabulary, 0)).requires_grad_(False)


def _configuration(plan: Pretraining, vocabulary: int, end_of_text: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=plan.max_length,
        n_layer=plan.layers,
        n_embd=plan.width,
        n_head=plan.heads,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )


def pretrain(texts: list[str], validation: list[str], plan: Pretraining, directory: Path) -> dict[str, float]:
    """Train tokenizer and model on public texts; write both to ``directory`` as a hub checkpoint is laid out.

    Returns: ``parameters``, ``tokens_per_text`` and ``validation_perplexity``.
    """
    tokenizer = train_tokenizer(texts, plan.vocabulary)
    tokens = tokenize(texts, tokenizer, plan.max_length)
    torch.manual_seed(plan.seed)
    model = fuse_activations(GPT2LMHeadModel(_configuration(plan, len(tokenizer), tokenizer.eos_token_id)))
    model.train()
    fit(
        model,
        tokens,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
        description="pretraining the public model",
    )
    model.save_pretrained(directory, safe_serialization=True)
    tokenizer.save_pretrained(directory)
    return {
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "tokens_per_text": float(np.mean([len(row) for row in tokens.rows])),
        "validation_perplexity": perplexity(model, tokenize(validation, tokenizer, plan.max_length), plan.batch_size),
    }
