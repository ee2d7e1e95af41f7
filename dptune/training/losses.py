"""Losses with one value for each sequence, and token-level perplexity.

The hub classes' own ``labels=`` loss averages over all tokens of the padded batch, so that adding one record
rescales every other record's gradient and no clip radius bounds the change. Here each sequence is alone.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

#: Values of a mask: no token; a token that counts in the loss; a token that is only read, such as a prompt's.
PADDING, COUNTED, CONTEXT = 0, 1, 2
#: Model types whose logits are the output layer on the last hidden states, and nothing else.
_PLAIN_HEADS = ("gpt2", "llama", "mistral")
#: Logits that exist at a time: what a core's cache holds, or enough to fill an accelerator; but no fewer positions than
#: a matrix product needs to be efficient.
_LOGITS_ON_CPU, _LOGITS, _FEWEST = 1 << 20, 1 << 26, 512
_OF_TOKENS = frozenset(MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values())
_CLASSIFIERS = _OF_TOKENS | frozenset(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())


def attention_mask(mask: torch.Tensor) -> torch.Tensor:
    """The model's attention mask: 1 for every token, whether it counts in the loss or not."""
    return (mask != PADDING).to(mask.dtype)


def token_losses(
    logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihoods of each next token.

    Args:
        logits: (rows, tokens, vocabulary); any float dtype, the loss is float32.
        input_ids: (rows, tokens).
        mask: (rows, tokens), ``COUNTED`` for tokens that count; ``PADDING`` on the right.

    Returns: (rows, tokens - 1) losses, zero where the token does not count, and (rows, tokens - 1) whether each counts.
    """
    targets, valid = input_ids[:, 1:], mask[:, 1:] == COUNTED
    losses = cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none")
    return losses.where(valid, 0.0), valid


def sequence_losses(logits: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows,): each sequence's mean loss over its own tokens that count; 0 where no token after the first does."""
    losses, valid = token_losses(logits, input_ids, mask)
    return losses.sum(dim=1) / valid.sum(dim=1).clamp(min=1)


def counted_tokens(mask: torch.Tensor) -> torch.Tensor:
    """(rows,): how many tokens of each sequence count in its loss."""
    return (mask[:, 1:] == COUNTED).sum(dim=1)


def is_classifier(model: Any) -> bool:
    """Whether a model, with or without PEFT's adapters, gives one row of label logits for each text."""
    return type(base_of(model)).__name__ in _CLASSIFIERS


def reads_mean(model: Any) -> bool:
    """Whether a classifier, with or without PEFT's adapters, gives label logits for each token: their mean counts."""
    return type(base_of(model)).__name__ in _OF_TOKENS


def base_of(model: Any) -> Any:
    """The model of transformers, without PEFT's adapters around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def label_logits(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The label logits of a classifier, and the labels, of rows whose one counted entry is the label's number.

    A classifier that gives logits for each token (``reads_mean``) is asked for their mean over the row's own tokens.

    The model sees that entry neither as a token nor as a position that it may attend to.

    Args:
        input_ids, mask: (rows, tokens) as ``model_losses`` takes them.

    Returns: (rows, labels) logits, and (rows,) labels; -1 for a row without one.
    """
    counted = mask == COUNTED
    counted[:, 0] = False  # a row that only fills the batch counts there, and has no label
    labels = torch.where(counted, input_ids, -1).amax(dim=1)
    padding = base_of(model).config.get_text_config().pad_token_id or 0
    seen = attention_mask(mask.masked_fill(counted, PADDING))
    # A causal model's classifier looks for the last token that is no padding, whatever the mask says.
    # A cache of keys would grow when a checkpointed layer runs again.
    cacheless = {"use_cache": False} if "use_cache" in signature(base_of(model).forward).parameters else {}
    logits = model(input_ids=input_ids.masked_fill(seen == PADDING, padding), attention_mask=seen, **cacheless).logits
    return (_mean_over(logits, seen) if reads_mean(model) else logits), labels


def _mean_over(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """(rows, labels): mean of (rows, tokens, labels) over the tokens that are seen, whatever the others hold."""
    kept = logits.float().where(seen[..., None] != PADDING, 0.0)
    return kept.sum(dim=1) / seen.sum(dim=1, keepdim=True).clamp(min=1)


def model_losses(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows,) ``sequence_losses`` of a causal language model, without its logits where it is of a known family.

    Of a classifier, the cross-entropy of each row's label, which is the row's one counted entry (``label_logits``).

    Args:
        model: a model of transformers, with or without PEFT's adapters.
        input_ids: (rows, tokens).
        mask: (rows, tokens), of ``PADDING`` (on the right), ``COUNTED`` and ``CONTEXT``.
    """
    if is_classifier(model):
        logits, labels = label_logits(model, input_ids, mask)
        return cross_entropy(logits.float(), labels, reduction="none", ignore_index=-1)
    causal = base_of(model)
    head = causal.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and head.bias is None and not head.weight.requires_grad
    if not (plain and causal.config.model_type in _PLAIN_HEADS):
        logits = model(input_ids=input_ids, attention_mask=attention_mask(mask), use_cache=False).logits
        return sequence_losses(logits, input_ids, mask)
    decoder = getattr(causal, causal.base_model_prefix)
    hidden = decoder(input_ids=input_ids, attention_mask=attention_mask(mask), use_cache=False).last_hidden_state
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    losses: torch.Tensor = _HeadLosses.apply(hidden.to(dtype), head.weight.to(dtype), input_ids, mask)
    return losses


class _HeadLosses(torch.autograd.Function):
    """Output layer and loss in one, a few positions at a time; the gradient is made on the way forward.

    Logits, their softmax and its gradient are each as large as everything else together; no two pieces of them exist at
    once. All pieces have one size, which follows the shape of the batch alone.
    """

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weight: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """(rows,) float32 losses from (rows, tokens, width) states and the frozen (vocabulary, width) weight."""
        rows, tokens, width = hidden.shape
        valid = mask[:, 1:] == COUNTED
        counts = valid.sum(dim=1, keepdim=True).clamp(min=1)
        targets, shares = input_ids[:, 1:].reshape(-1, 1), (valid / counts).reshape(-1, 1)
        states = hidden[:, :-1].reshape(-1, width)
        losses = states.new_empty(len(states), 1, dtype=torch.float32)
        gradients = torch.empty_like(states)
        at_a_time = max(_FEWEST, (_LOGITS_ON_CPU if hidden.device.type == "cpu" else _LOGITS) // len(weight))
        for start in range(0, len(states), at_a_time):
            # The last piece begins earlier rather than being shorter: kernels round differently by shape, and a record
            # that joins would move others into it.
            start = max(0, min(start, len(states) - at_a_time))
            piece = slice(start, start + at_a_time)
            logits = (states[piece] @ weight.T).float()
            slope = logits.softmax(dim=1)
            # The largest probability is never 0, so this is log sum exp without another pass of exponentials.
            total = logits.amax(dim=1, keepdim=True) - slope.amax(dim=1, keepdim=True).log()
            losses[piece] = total - logits.gather(1, targets[piece])
            slope.scatter_add_(1, targets[piece], torch.full_like(total, -1.0))
            slope.mul_(shares[piece])
            torch.mm(slope.to(weight.dtype), weight, out=gradients[piece])
        # Set to 0, for 0 times an infinite state would be NaN, though the position does not count.
        gradients.masked_fill_(~valid.reshape(-1, 1), 0.0)
        context.save_for_backward(gradients)
        context.shape = (rows, tokens, width)
        return (losses.view(rows, -1).where(valid, 0.0)).sum(dim=1) / counts[:, 0]

    @staticmethod
    def backward(context: Any, *of_losses: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Each row's gradient times the derivative with respect to its loss."""
        (gradients,) = context.saved_tensors
        rows, tokens, width = context.shape
        found = gradients.new_zeros(rows, tokens, width)
        torch.mul(
            gradients.view(rows, tokens - 1, width), of_losses[0][:, None, None].to(gradients.dtype), out=found[:, :-1]
        )
        return found, None, None, None
