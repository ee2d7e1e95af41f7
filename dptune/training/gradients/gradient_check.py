"""Checks per-sample gradients on made-up tokens before a run: a record must have the same gradient as alone.

That a layer's inputs have the right shape does not say which record each of them belongs to. So the gradients of a
small batch, of records of different lengths, are compared with those of each record by itself. A layer that mixes
records, or puts them in another order, is named before anything is charged, and so is one that no text reaches.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dptune.core.errors import ConfigError, DptuneError, first_line, is_of_device
from dptune.training.gradients.layer_gradients import layer_gradients
from dptune.training.gradients.layer_kinds import FIELD, LEAVE_OUT, Float64
from dptune.training.gradients.parameter_groups import Block, LayerModules, PairModules
from dptune.training.gradients.per_sample import per_sample_gradients
from dptune.training.losses import CONTEXT, COUNTED, attention_mask, base_of, is_classifier, label_logits, model_losses
from dptune.training.models.causal import evaluation_mode, plain_tokens
from dptune.training.models.quantization import method_of

_log = logging.getLogger(__name__)
#: Tokens of the records, fewer than any shape would confuse with the number of records.
_LENGTHS = (7, 5, 3)
#: Distances of a layer's gradient from the loop's, relative to its norm. Up to the first the layer is taken: kernels
#: round by shape. Beyond it the layer is doubtful, and float64 decides, where rounding explains less than a billionth.
#: Where float64 is not to be had, for want of memory or in 4 bits, it is refused beyond the second.
_DOUBTFUL = {torch.float32: (1e-4, 1e-2), torch.float64: (1e-6, 1e-6)}
_DOUBTFUL_IN_HALF = (0.1, 0.3)
_CLOSE_IN_FLOAT64 = 1e-6
#: A pair whose gradient is so small a part of the record's has nothing to compare.
_NOTHING = 1e-6


def rehearse(model: Any, pairs: Sequence[Block], *, checkpointing: bool = False) -> None:
    """Compare the per-sample gradients of a batch with a loop over its records; the model is left as it was.

    Reads no data. Adapters are moved away from B = 0 for it, where A has no gradient, and put back.

    Args:
        model: the PEFT model, or one whose own weights train.
        pairs: the result of ``lora_pairs(model)``, of ``trained_blocks(model)`` or of ``layer_groups(model)``.
        checkpointing: whether the run checkpoints layers: the batch is then computed so too, the loop never.

    Raises: ConfigError naming a layer whose gradients are not each record's own, or the model if transformers' own
        checkpointing is on.
    """
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        problem = (
            "has transformers' own gradient checkpointing switched on, which works only in training mode; dptune "
            "does not train in that mode"
        )
        fix = "take it out of config.json, or call model.gradient_checkpointing_disable(); and set "
        fix += "training.gradient_checkpointing"
        raise ConfigError("model", problem, fix=fix)
    ids, mask = made_up_records(model)
    with evaluation_mode(model), _random_up_factors(pairs):
        try:
            off, alone = _distances(model, pairs, ids, mask, checkpointing)
        except ConfigError:
            raise
        except Exception as error:  # an adapter may sit where the model does not expect one, and raise anything
            raise _refusal(model, pairs, error) from error
        _check_gradients(alone)
        doubtful, close = _DOUBTFUL.get(next(model.parameters()).dtype, _DOUBTFUL_IN_HALF)
        if not all(distance <= doubtful for distance in off):  # nor a NaN
            try:
                with in_float64(model):
                    exact = _distances(model, pairs, ids, mask, checkpointing)[0]
                # Rounding is harmless where it follows from shapes. What follows from other records couples them.
                swayed = _swayed(model, pairs, ids, mask, checkpointing)
                off = [one if other <= doubtful else other for one, other in zip(exact, swayed, strict=True)]
                close = _CLOSE_IN_FLOAT64
            except Exception as error:  # memory, or an operation that knows no float64
                _log.debug("the rehearsal was not repeated in float64: %s", first_line(error))
    for pair, distance in zip(pairs, off, strict=True):
        if not distance <= close:
            problem = (
                f"layer {pair.name} gives a record another gradient in a batch than alone (relative error "
                f"{distance:.2g}): its rows are not the records'"
            )
            field, fix = "lora.target_modules", "name the other layers that are to train, without this one"
            raise ConfigError(*((FIELD, problem) if _by_layer(pairs) else (field, problem)), fix=fix)


def _refusal(model: Any, pairs: Sequence[Block], error: Exception) -> ConfigError:
    """The error for a model that fails with its adapters: it names the adapted layer that failed, if one did.

    Some layers are linear and yet no place for an adapter: a router of experts returns two tensors, and PEFT adds the
    adapter's output to one.
    """
    why = f"({type(error).__name__}: {first_line(error)})"
    names = {id(model.get_submodule(pair.name)): pair.name for pair in pairs if isinstance(pair, PairModules)}
    names |= {id(layer): group.name for group in _by_layer(pairs) for layer in group.modules}
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [one.get(name) for one in frames for name in ("self", "layer")]
    failed: Any = next((one for one in callers if id(one) in names), None)
    if failed is None:
        problem = f"no gradients of a short text can be computed {why}"
        return ConfigError("model", problem, fix="train another model, or adapt other layers")
    name = names[id(failed)]
    if _by_layer(pairs):
        problem = f"each record's gradient of layer {name} ({type(failed).__name__}) cannot be computed {why}"
        return ConfigError(FIELD, problem, fix=LEAVE_OUT)
    others = sorted({one.rpartition(".")[2] for one in names.values()} - {name.rpartition(".")[2]})
    fix = f"name other layers ({', '.join(others) or 'such as its query and value projections'})"
    problem = f"layer {name} ({type(failed.base_layer).__name__}) cannot take an adapter {why}"
    return ConfigError("lora.target_modules", problem, fix=fix)


def _distances(
    model: Any, pairs: Sequence[Block], ids: torch.Tensor, mask: torch.Tensor, checkpointing: bool
) -> tuple[list[float], list[torch.Tensor]]:
    """Each pair's largest relative distance of a record's gradient in the batch from that alone; the latter's norms."""
    sizes: list[torch.Tensor] = []

    def compared() -> Iterator[_Compared]:
        records = _by_record(model, pairs, ids, mask, checkpointing)
        for row, (own, norms) in zip(range(len(ids)), records, strict=True):
            length = _LENGTHS[row]
            alone = _alone(model, pairs, ids[row : row + 1, :length], mask[row : row + 1, :length])
            sizes.append(_norms(alone).norm())
            yield own, norms, alone

    return _farthest(pairs, compared()), sizes


def _swayed(
    model: Any, pairs: Sequence[Block], ids: torch.Tensor, mask: torch.Tensor, checkpointing: bool
) -> list[float]:
    """Each pair's largest relative distance of a record's gradient among other records of the same shape."""
    first, two = list(_by_record(model, pairs, ids, mask, checkpointing)), []
    for row in range(len(ids)):
        others = ids.flip(1).roll(1, 0)  # other tokens, of other records
        if is_classifier(model):
            others = others.where(mask != COUNTED, ids)  # a label stays one
        others[row] = ids[row]
        two.append((*list(_by_record(model, pairs, others, mask, checkpointing))[row], first[row][0]))
    return _farthest(pairs, two)


def _by_layer(pairs: Sequence[Block]) -> list[LayerModules]:
    """The layers whose own weights train; none where LoRA pairs and a head do."""
    return [pair for pair in pairs if isinstance(pair, LayerModules)]


#: A record's gradient of each pair, flat, and their norms as a clipper gets them; and what the first are compared with.
_Compared = tuple[Sequence[torch.Tensor], torch.Tensor, Sequence[torch.Tensor]]


def _by_record(
    model: Any, pairs: Sequence[Block], ids: torch.Tensor, mask: torch.Tensor, checkpointing: bool
) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
    """Each record's gradient of each pair in the batch, flat, with their norms as a clipper gets them.

    Of layers, one record after the other: the sum with factor 1 for it and 0 for the others.
    """
    if layers := _by_layer(pairs):
        sums = layer_gradients(model, layers, ids, mask, None, len(ids), checkpointing=checkpointing)
        for row in range(len(ids)):
            factors = torch.zeros_like(sums.norms())
            factors[row] = 1.0
            yield sums.weighted_sum(factors, keep=row + 1 < len(ids)), sums.norms()[row]
        return
    found = per_sample_gradients(model, pairs, ids, mask, None, len(ids), checkpointing=checkpointing)
    for gradient, norms in zip(found.matrix(), found.norms(), strict=True):
        yield gradient.split([pair.size for pair in pairs]), norms


def _norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])


def _farthest(pairs: Sequence[Block], compared: Iterable[_Compared]) -> list[float]:
    """Each pair's largest distance between two gradients of a record, or their norms, relative to the second's norm."""
    found = torch.zeros(len(pairs), dtype=torch.float64)
    for own, norms, expected in compared:
        sizes = _norms(expected)
        off = _norms([one.double() - other.double() for one, other in zip(own, expected, strict=True)])
        off = off.maximum((norms - sizes).abs())
        # If a distance is NaN, the maximum is NaN, and the layer is refused.
        relative = off / sizes.maximum(_NOTHING * sizes.norm())
        found = found.to(off.device).maximum(torch.where(off > 0, relative, off))
    return list(found.tolist())


@contextmanager
def in_float64(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model computes in float64, also where its code asks for float32; its own tensors come back.

    Takes the memory of a copy in float64 beside the model.

    Raises: ConfigError for a model with weights in 4 bits, whose products are not made in float64.
    """
    if method_of(model.config) is not None:
        raise ConfigError("model.load_in_4bit", "has no products in float64", fix="load the model without it")
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        with Float64():
            yield
    finally:
        for tensor, own in zip(tensors, before, strict=True):
            tensor.data = own
        for module, own_buffers in buffers:  # model code may put a new one in the place of its buffer
            module._buffers.update(own_buffers)


def _check_gradients(norms: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError for gradients that are no numbers, or all zero: nothing could be learned by them."""
    sizes = torch.stack(list(norms))
    if not bool(torch.isfinite(sizes).all()):
        problem = "computes no finite gradient of a short text"
        raise ConfigError("model", problem, fix="check its weights and config.json; or give another dtype")
    if not bool(sizes.any()):
        problem = "has no gradient at all of a short text: no token reaches a layer that is adapted"
        raise ConfigError("model", problem, fix="check that its weights are not all zero; or adapt other layers")


def check_width(model: Any, width: int) -> None:
    """Check that the model evaluates a record of ``width`` made-up tokens: a step that fails is charged at every retry.

    Raises: ConfigError naming the most tokens that it takes, or the model if it evaluates no short text either.
    """
    error = _evaluation_error(model, width)
    if error is None:
        return
    why = f"({type(error).__name__}: {first_line(error)})"
    takes, fails = max(_LENGTHS), width
    if width <= takes or _evaluation_error(model, takes) is not None:
        problem = f"({type(base_of(model)).__name__}) evaluates no text {why}"
        raise ConfigError("model", problem, fix="give another model; this one's code fails, whatever the settings")
    while fails - takes > 1:
        middle = (takes + fails) // 2
        takes, fails = (middle, fails) if _evaluation_error(model, middle) is None else (takes, middle)
    raise ConfigError(
        "training.max_length", f"the model does not take {width} tokens {why}", fix=f"use {takes} or less"
    )


@torch.no_grad()
def _evaluation_error(model: Any, width: int) -> Exception | None:
    """What the model raises of a text of ``width`` tokens, as it is evaluated, also if it predicts no finite numbers;
    None if nothing."""
    base, device = base_of(model), next(model.parameters()).device
    tokens = plain_tokens(base)
    ids = tokens[torch.arange(width) % len(tokens)][None].to(device)
    mask = torch.full_like(ids, COUNTED if not is_classifier(model) else CONTEXT)
    try:
        with evaluation_mode(model):
            if is_classifier(model):
                logits, _ = label_logits(model, ids, mask)
            else:
                logits = model(input_ids=ids, attention_mask=attention_mask(mask), use_cache=False).logits
        if not bool(torch.isfinite(logits).all()):
            raise ArithmeticError("its predictions are not finite numbers")
    except Exception as error:  # each model has its own way to refuse a text
        return error
    return None


@contextmanager
def first_evaluation(model: Any) -> Iterator[None]:
    """Context of the first evaluation of a rehearsed model: an error of its own code is named, as nothing is paid yet.

    Raises: ConfigError for a model that fails on some record, such as a very short one; whatever a device raises.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DptuneError) or is_of_device(error):
            raise
        problem = f"({type(base_of(model)).__name__}) cannot evaluate some of the held-out or public records "
        problem += f"({type(error).__name__}: {first_line(error)})"
        raise ConfigError(
            "model", problem, fix="give another model, or evaluate nothing (eval_share 0, no public)"
        ) from error


def made_up_records(
    model: Any, lengths: Sequence[int] = _LENGTHS, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(records, tokens) plain tokens, padded on the right, and their mask; a classifier's rows end in a label.

    Args:
        lengths: tokens of each record, three at least.
        width: tokens in all (default: those of the longest record).
    """
    device = next(model.parameters()).device
    tokens, generator = plain_tokens(base_of(model)), torch.Generator().manual_seed(1)
    shape = (len(lengths), max(lengths) if width is None else width)
    ids = tokens[torch.randint(len(tokens), shape, generator=generator)]
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]) * COUNTED
    if is_classifier(model):
        rows, ends = torch.arange(shape[0]), torch.tensor(lengths) - 1
        mask *= CONTEXT
        mask[rows, ends], ids[rows, ends] = COUNTED, rows % base_of(model).config.num_labels
    return ids.to(device), mask.to(device, torch.int64)


def _alone(model: Any, pairs: Sequence[Block], ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """One unpadded record's gradient of each pair, flat, by plain autograd."""
    loss = model_losses(model, ids, mask).sum()
    weights = [parameter for pair in pairs for parameter in pair.parameters]
    found = iter(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))
    return [torch.cat([next(found).flatten() for _ in pair.parameters]) for pair in pairs]


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
