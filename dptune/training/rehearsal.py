"""Checks per-sample gradients on made-up tokens before a run: a record must have the same gradient as alone.

That a layer's inputs have the right shape does not say which record each of them belongs to. So the gradients of a
small batch, of records of different lengths, are compared with those of each record by itself. A layer that mixes
records, or puts them in another order, is named before anything is charged, and so is one that no text reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dptune.errors import ConfigError, first_line
from dptune.training.causal import evaluation_mode, plain_tokens
from dptune.training.losses import CONTEXT, COUNTED, is_classifier, model_losses
from dptune.training.per_sample import Block, PairModules, per_sample_gradients

#: Tokens of the records, fewer than any shape would confuse with the number of records.
_LENGTHS = (7, 5, 3)
#: Largest distance of a gradient from the loop's, relative to its norm: kernels round by shape. If rows are mixed, the
#: distance is about 1.
_CLOSE = {torch.float32: 1e-2, torch.float64: 1e-2}
_CLOSE_IN_HALF = 0.3
#: A pair whose gradient is so small a part of the record's has nothing to compare.
_NOTHING = 1e-6


def rehearse(model: Any, pairs: Sequence[Block], *, checkpointing: bool = False) -> None:
    """Compare the per-sample gradients of a batch with a loop over its records; the model is left as it was.

    Reads no data. Adapters are moved away from B = 0 for it, where A has no gradient, and put back.

    Args:
        model: the PEFT model.
        pairs: the result of ``lora_pairs(model)``, or of ``trained_blocks(model)``.
        checkpointing: whether the run checkpoints layers: the batch is then computed so too, the loop never.

    Raises: ConfigError naming a layer whose gradients are not each record's own, or the model if transformers' own
        checkpointing is on.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        problem = "has transformers' gradient checkpointing on, which works in training mode alone: runs are not in it"
        fix = "call model.gradient_checkpointing_disable(), and set training.gradient_checkpointing"
        raise ConfigError("model", problem, fix=fix)
    ids, mask = _records(model)
    with evaluation_mode(model), _random_up_factors(pairs):
        try:
            found = per_sample_gradients(model, pairs, ids, mask, None, len(ids), checkpointing=checkpointing)
            alone = [
                _alone(model, pairs, ids[row : row + 1, :length], mask[row : row + 1, :length])
                for row, length in enumerate(_LENGTHS)
            ]
        except ConfigError:
            raise
        except Exception as error:  # an adapter may sit where the model does not expect one, and raise anything
            problem = f"no gradients of a short text can be computed ({type(error).__name__}: {first_line(error)})"
            raise ConfigError("model", problem, fix="train another model, or adapt other layers") from error
        matrix = found.matrix()
    close = _CLOSE.get(next(model.parameters()).dtype, _CLOSE_IN_HALF)
    for row, expected in enumerate(alone):
        start, whole = 0, float(expected.norm())
        for pair in pairs:
            part = slice(start, start + pair.size)
            start += pair.size
            norm = float(expected[part].norm())
            off = float((matrix[row, part] - expected[part]).norm())
            if not off <= close * max(norm, _NOTHING * whole):  # nor a NaN
                problem = (
                    f"layer {pair.name} gives a record another gradient in a batch than alone (relative error "
                    f"{off / max(norm, _NOTHING * whole):.2g}): its rows are not the records'"
                )
                raise ConfigError(
                    "lora.target_modules", problem, fix="name the other layers that are to train, without this one"
                )


def check_width(model: Any, width: int) -> None:
    """Check that the model takes a record of ``width`` made-up tokens: a step that fails is charged at every retry.

    Raises: ConfigError if it does not.
    """
    tokens, device = plain_tokens(model.get_base_model()), next(model.parameters()).device
    ids = tokens[torch.arange(width) % len(tokens)][None].to(device)
    try:
        with evaluation_mode(model), torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except Exception as error:  # each model has its own way to refuse a long text
        problem = f"the model does not take {width} tokens ({type(error).__name__}: {first_line(error)})"
        raise ConfigError("training.max_length", problem, fix="lower it") from error


def _records(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(records, tokens) plain tokens, padded on the right, and their mask; a classifier's rows end in a label."""
    device = next(model.parameters()).device
    tokens, generator = plain_tokens(model.get_base_model()), torch.Generator().manual_seed(1)
    shape = (len(_LENGTHS), max(_LENGTHS))
    ids = tokens[torch.randint(len(tokens), shape, generator=generator)]
    mask = (torch.arange(shape[1]) < torch.tensor(_LENGTHS)[:, None]) * COUNTED
    if is_classifier(model):
        rows, ends = torch.arange(shape[0]), torch.tensor(_LENGTHS) - 1
        mask *= CONTEXT
        mask[rows, ends], ids[rows, ends] = COUNTED, rows % model.get_base_model().config.num_labels
    return ids.to(device), mask.to(device, torch.int64)


def _alone(model: Any, pairs: Sequence[Block], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The flat float64 gradient of one unpadded record, by plain autograd."""
    loss = model_losses(model, ids, mask).sum()
    weights = [parameter for pair in pairs for parameter in pair.parameters]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients]).double()


@contextmanager
def _random_up_factors(blocks: Sequence[Block]) -> Iterator[None]:
    """Context in which every B factor holds small random numbers; the old values come back at its end.

    The larger a pair's scaling, the smaller they are: an adapter a hundred times the base's size would fill the model
    with numbers whose rounding looks like mixed rows.
    """
    generator = torch.Generator().manual_seed(2)
    pairs = [block for block in blocks if isinstance(block, PairModules)]
    before = [pair.up.weight.detach().clone() for pair in pairs]
    try:
        with torch.no_grad():
            for pair in pairs:
                weight = pair.up.weight
                weight.copy_(0.02 / max(1.0, pair.scaling) * torch.randn(weight.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for pair, weight in zip(pairs, before, strict=True):
                pair.up.weight.copy_(weight)
