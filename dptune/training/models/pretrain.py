"""A small public base model with a tokenizer of its own, trained on public texts from scratch: a GPT-2 or a RoBERTa.

It stands in for a hub model where none can be downloaded. It never sees a private record.

Plain training has no privacy: it is for public models, and for models that only answer through a protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from dptune.core.files import naming
from dptune.core.progress import progress
from dptune.core.settings import Pretraining
from dptune.training.data import Tokens, tokenize
from dptune.training.evaluation import perplexity
from dptune.training.losses import attention_mask, model_losses
from dptune.training.models.causal import evaluation_mode
from dptune.training.models.model import fuse_activations

#: Raised by hand with a change that gives other weights or another tokenizer for the same texts and plan: until then,
#: the pipeline keeps a model that it made of the same ones.
VERSION = 1
END_OF_TEXT = "<|endoftext|>"
_CPU = torch.device("cpu")
#: RoBERTa's special tokens in the order of their ids, by the names that transformers has for them.
_ROBERTA = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "cls_token": "<s>",
    "sep_token": "</s>",
}


def train_tokenizer(
    texts: list[str], vocabulary: int, merges: str = "sentences", shape: str = "gpt2"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE; any text can be encoded.

    Args:
        merges: "sentences" lets merges span words but not sentences: a narrative is a list of stock sentences, so one
            clause becomes a few tokens and a record about eighty, five times fewer than GPT-2's, which is what lets
            two slow cores fine-tune. "words" splits texts as GPT-2's does.
        shape: "gpt2", with one special token; "roberta", which puts ``<s>`` and ``</s>`` around a text.
    """
    tokenizer = Tokenizer(models.BPE())
    if merges == "sentences":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"[^.]*\. ?"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT] if shape == "gpt2" else list(dict.fromkeys(_ROBERTA.values())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if shape == "gpt2":
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_ROBERTA)


def without_weights(plan: Pretraining) -> Any:
    """The layers of the model that ``pretrain`` makes, with no memory behind them (device "meta")."""
    with torch.device("meta"):
        return _model(plan, plan.vocabulary).requires_grad_(False)


def _model(plan: Pretraining, vocabulary: int) -> Any:
    """The model of a plan with new weights. Its special tokens have the ids that ``train_tokenizer`` gives them."""
    # A few passes over millions of words: so small a model learns less than they hold, and needs no dropout.
    dropout = 0.0 if plan.merges == "words" else 0.1
    if plan.shape == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                vocab_size=vocabulary,
                n_positions=plan.max_length,
                n_layer=plan.layers,
                n_embd=plan.width,
                n_head=plan.heads,
                bos_token_id=0,
                eos_token_id=0,
                pad_token_id=0,
            )
        )
    return RobertaForMaskedLM(
        RobertaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=plan.max_length + 2,  # RoBERTa's positions start after that of padding, which is 1
            num_hidden_layers=plan.layers,
            hidden_size=plan.width,
            num_attention_heads=plan.heads,
            intermediate_size=4 * plan.width,
            type_vocab_size=1,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
        )
    )


def pretrain(
    texts: list[str], validation: list[str], plan: Pretraining, directory: Path, device: torch.device = _CPU
) -> dict[str, float]:
    """Train tokenizer and model on public texts; write both to ``directory`` as a hub checkpoint is laid out.

    The tokenizer and the first weights are the same on every device; the trained weights are its own.

    Returns: ``parameters``, ``tokens`` (of all texts, once), ``tokens_per_text`` and ``validation_perplexity``, which
    of an encoder is that of masked tokens given all others.
    """
    tokenizer = train_tokenizer(texts, plan.vocabulary, plan.merges, plan.shape)
    tokens, held_out = (_rows(some, tokenizer, plan) for some in (texts, validation))
    torch.manual_seed(plan.seed)
    model = fuse_activations(_model(plan, len(tokenizer))).to(device)
    model.train()
    masks = torch.Generator().manual_seed(plan.seed)
    mask = tokenizer.mask_token_id
    fit(
        model,
        tokens,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        seed=plan.seed,
        description="pretraining the public model",
        autocast=torch.bfloat16 if device.type == "cuda" and plan.dtype == "bfloat16" else None,
        losses=partial(masked_losses, mask_token=mask, draws=masks) if plan.shape == "roberta" else model_losses,
    )
    with naming(directory):
        model.to(getattr(torch, plan.dtype)).save_pretrained(directory, safe_serialization=True)
        tokenizer.save_pretrained(directory)
    if plan.shape == "roberta":
        found = masked_perplexity(model, held_out, mask, plan.batch_size, plan.seed)
    else:
        found = perplexity(model, held_out, plan.batch_size)
    return {
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "tokens": float(sum(map(len, tokens.rows))),
        "tokens_per_text": sum(map(len, tokens.rows)) / len(texts),
        "validation_perplexity": found,
    }


def _rows(texts: list[str], tokenizer: Any, plan: Pretraining) -> Tokens:
    """A row for each text, cut; of free text, rows of ``max_length`` tokens that follow one another."""
    if plan.merges == "sentences":
        return tokenize(texts, tokenizer, plan.max_length)
    around = 2 if plan.shape == "roberta" else 1
    most, end = plan.max_length - around, tokenizer.eos_token_id
    rows = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for start in range(0, len(ids), most):
            piece = [*ids[start : start + most], end]
            rows.append(np.array([tokenizer.bos_token_id, *piece] if around == 2 else piece, dtype=np.int32))
    return Tokens(rows, padding=tokenizer.pad_token_id, width=plan.max_length + 1)


# The loss of an encoder that fills in masked tokens (Devlin et al. 2019, section 3.1), for its public pre-training.


#: Share of the tokens that are to be found, and of those the shares that are masked, or replaced by random ones.
_CHOSEN, _MASKED, _RANDOM = 0.15, 0.8, 0.1
#: Ids below are special tokens, of which none is chosen.
_SPECIAL = 5


def masked_losses(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor, *, mask_token: int, draws: torch.Generator
) -> torch.Tensor:
    """(rows,) mean cross-entropy of each row's chosen tokens, of which the model sees masks or random tokens mostly.

    Args:
        model: a masked language model of transformers.
        input_ids, mask: (rows, tokens); special tokens have the ids below 5.
        mask_token: id of the token that stands for a masked one.
        draws: generator on the CPU of the choices.
    """
    chance = torch.rand(input_ids.shape, generator=draws).to(input_ids.device)
    fate = torch.rand(input_ids.shape, generator=draws).to(input_ids.device)
    other = torch.randint(_SPECIAL, model.config.vocab_size, input_ids.shape, generator=draws).to(input_ids.device)
    chosen = (chance < _CHOSEN) & (input_ids >= _SPECIAL) & (mask != 0)
    seen = torch.where(chosen & (fate < _MASKED), mask_token, input_ids)
    seen = torch.where(chosen & (fate >= 1 - _RANDOM), other, seen)
    states = model.roberta(input_ids=seen, attention_mask=attention_mask(mask)).last_hidden_state
    rows = chosen.nonzero()[:, 0]
    # The output layer at chosen positions alone, which are a seventh.
    losses = cross_entropy(model.lm_head(states[chosen]), input_ids[chosen], reduction="none")
    totals = losses.new_zeros(len(input_ids)).index_add(0, rows, losses)
    return totals / chosen.sum(dim=1).clamp(min=1)


@torch.no_grad()
def masked_perplexity(model: Any, tokens: Tokens, mask_token: int, rows: int, seed: int) -> float:
    """exp of the mean loss of chosen tokens, by one choice of ``seed``, each row weighted alike."""
    draws, found = torch.Generator().manual_seed(seed), []
    device = next(model.parameters()).device
    with evaluation_mode(model):
        for start in range(0, len(tokens.rows), rows):
            ids, mask = tokens.compact(np.arange(start, min(start + rows, len(tokens.rows))), device)
            found.append(masked_losses(model, ids, mask, mask_token=mask_token, draws=draws))
    return math.exp(float(torch.cat(found).double().mean()))


def fit(
    model: Any,
    tokens: Tokens,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    description: str,
    losses: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor] = model_losses,
    autocast: torch.dtype | None = None,
    schedule: str = "one_cycle",
) -> None:
    """Train what requires a gradient by AdamW with a weight decay of 0.01; the model is in its training mode.

    Args:
        tokens: the records, at least one.
        seed: seed of the order of records.
        description: text of the progress bar.
        losses: the (rows,) losses of a batch, of the model, its ids and its mask.
        autocast: dtype of the forward pass.
        schedule: a key of ``SCHEDULES``.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device, batches_an_epoch = parameters[0].device, math.ceil(len(tokens.rows) / batch_size)
    steps = epochs * batches_an_epoch
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: SCHEDULES[schedule](step, steps))
    order = np.random.default_rng(seed)
    # In percent: the number of steps would tell how many records there are.
    for step in progress(range(steps), description, total=steps, percent=True):
        if step % batches_an_epoch == 0:
            batches = np.array_split(order.permutation(len(tokens.rows)), batches_an_epoch)
        ids, mask = tokens.compact(batches[step % batches_an_epoch], device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            loss = losses(model, ids, mask).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        rates.step()


def one_cycle(step: int, steps: int) -> float:
    """Share of the highest learning rate: a cosine from 1/25 up over a tenth of the steps, then down to 1/250,000.

    As torch's ``OneCycleLR``, which divides by zero at ten steps and hardly moves at one: whether a private model can
    be trained must not depend on how many records it has.
    """
    top, first, last = max(0.1 * steps - 1, 0.0), 1 / 25, 1 / 25 / 1e4
    if step < top:
        return first + (1 - first) * (1 - math.cos(math.pi * step / top)) / 2
    done = (step - top) / max(steps - 1 - top, 1.0)
    return last + (1 - last) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


def linear(step: int, steps: int) -> float:
    """Share of the highest learning rate: from 1 down to 0 after the last step."""
    return 1 - min(step / max(steps, 1), 1.0)


SCHEDULES: dict[str, Callable[[int, int], float]] = {"one_cycle": one_cycle, "linear": linear}
