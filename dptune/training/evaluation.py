"""Losses of a model on records, and its token-level perplexity.

A classifier's scores are accuracy, F1, calibration and loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.core.errors import ConfigError
from dptune.core.progress import progress
from dptune.training.data import Tokens
from dptune.training.losses import attention_mask, is_classifier, label_logits, token_losses
from dptune.training.models.causal import evaluation_mode

_LARGEST_LOG = 700.0
_GROUPS, _FEWEST_GROUPS, _LEAST_IN_A_GROUP = 20, 4, 10
#: Total loss in nats, and number of predicted tokens, of each group of a set of records.
#: Bins of equal width over which ``Scores.calibration_error`` is taken.
BINS = 15


@dataclass(frozen=True)
class Scores:
    """Scores of predictions. Aggregates of the records: private if they are.

    Attributes:
        accuracy: share of the records whose likeliest label is their own.
        f1: F1 of each label that is true of or predicted for some record, on average (macro F1).
        calibration_error: expected calibration error (Guo et al. 2017, equation 3): the distance between the mean
            probability of the likeliest label and the accuracy, over ``BINS`` bins of that probability, each weighted
            by its share of the records.
        loss: mean negative log-probability (nats) of the records' own labels.
        largest_class: share of the records that have the most frequent label: the accuracy of a constant answer.
    """

    accuracy: float
    f1: float
    calibration_error: float
    loss: float
    largest_class: float


def score_classifier(model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None) -> Scores:
    """``scores_of`` a classifier on records; its training mode is restored. See ``label_probabilities``."""
    return scores_of(*label_probabilities(model, tokens, rows, autocast=autocast))


@torch.no_grad()
def label_probabilities(
    model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities (records, labels) in evaluation mode, and the records' own labels (records,). Private.

    Args:
        tokens: the records, each ending in its label (``labelled.labelled_tokens``); at least one.
        rows: physical batch size.
        autocast: dtype of the forward pass.
    """
    device, count = next(model.parameters()).device, len(tokens.rows)
    order = np.argsort([len(row) for row in tokens.rows], kind="stable")  # like lengths together: less padding
    found, labels = [], np.zeros(count, dtype=np.int64)
    with evaluation_mode(model):
        for start in range(0, count, rows):
            chosen = order[start : start + rows]
            ids, mask = tokens.compact(chosen, device)
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                logits, own = label_logits(model, ids, mask)
            found.append(logits.double().softmax(dim=1).cpu().numpy())
            labels[chosen] = own.cpu().numpy()
    probabilities = np.concatenate(found)
    return probabilities[np.argsort(order, kind="stable")], labels


def scores_of(probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> Scores:
    """The scores of probabilities (records, labels) of records with these labels (records,), numbers from 0."""
    predicted, surest = probabilities.argmax(axis=1), probabilities.max(axis=1)
    right = predicted == labels
    own = probabilities[np.arange(len(labels)), labels]
    with np.errstate(divide="ignore"):
        loss = -float(np.log(own).mean())
    return Scores(
        accuracy=float(right.mean()),
        f1=_macro_f1(predicted, labels),
        calibration_error=_calibration_error(surest, right),
        loss=loss,
        largest_class=float(np.bincount(labels).max() / len(labels)),
    )


def _macro_f1(predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    found = []
    for label in np.union1d(predicted, labels):
        both = int(((predicted == label) & (labels == label)).sum())
        found.append(2 * both / int((predicted == label).sum() + (labels == label).sum()))
    return float(np.mean(found))


def _calibration_error(surest: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    # A bin holds its upper end, as in the paper; probabilities of 0 do not occur.
    bins = np.clip(np.ceil(surest * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, weights=surest - right, minlength=BINS)
    return float(np.abs(gaps).sum() / len(surest))


LossGroups = list[list[float]]
#: A function from model, tokens, rows of a batch and autocast dtype to a figure, or to several.
Measure = Callable[..., float | Scores]


@dataclass(frozen=True)
class Measurement:
    """A measure and the records that it is taken on.

    Attributes:
        measure: one figure, or several.
        records: tokens of the records; None where there are none.
        private: whether the records are held-out private ones, which no epsilon covers.
    """

    measure: Measure
    records: Tokens | None
    private: bool


def measure_model(
    model: Any, wanted: Mapping[str, Measurement], rows: int, *, telemetry: str, autocast: torch.dtype | None = None
) -> dict[str, float]:
    """Figures of a model before or after training, by name, for every door.

    A measurement of private records is left out in two cases. Under private telemetry none is taken. Under research
    telemetry one is left out if no token of its records counts in the loss. An error would be worse for privacy: it
    would end the run, and whether a run ends can be seen by people who see no private figure. It would be worse for the
    user too: his run would end for a figure that training does not need. Public records are no secret, so a lack of
    counted tokens there is an error.

    Args:
        wanted: measurements by the names of their figures. A measure of several figures gives each the name that is
            here, an underscore and its own.
        rows: physical batch size.
        telemetry: "research" or "private".
        autocast: dtype of the forward pass.

    Returns: aggregates of the records: private if they are.

    Raises: ConfigError if no token of public records counts in the loss.
    """
    found: dict[str, float] = {}
    for name, one in wanted.items():
        tokens = one.records
        if tokens is None or (one.private and (telemetry == "private" or tokens.without_loss == len(tokens.rows))):
            continue
        value = one.measure(model, tokens, rows, autocast=autocast)
        if isinstance(value, Scores):
            found |= {f"{name}_{key}": float(figure) for key, figure in asdict(value).items()}
        else:
            found[name] = value
    return found


def perplexity(model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None) -> float:
    """exp of ``mean_loss``, which says what the arguments are."""
    loss = mean_loss(model, tokens, rows, autocast=autocast)
    return math.exp(loss) if loss < _LARGEST_LOG else math.inf


def perplexity_in_groups(
    model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None
) -> tuple[float, LossGroups]:
    """``perplexity``, and the losses of groups of the records, from which the error of its mean follows.

    The groups follow from the number of records alone, so two models that are measured on the same records can be
    compared group by group. Each holds neighbours, which often share a person or an article, and 10 records or more:
    like the perplexity, they are aggregates, private if the records are. None for fewer than 40 records and for a
    classifier.

    Returns: the perplexity; total loss (nats) and number of predicted tokens of each of at most 20 groups.
    """
    if is_classifier(model):
        return perplexity(model, tokens, rows, autocast=autocast), []
    losses, counts = record_losses(model, tokens, rows, autocast=autocast)
    if not counts.sum():
        return perplexity(model, tokens, rows, autocast=autocast), []  # says what is wrong
    loss = float(losses.sum() / counts.sum())
    number = min(_GROUPS, len(losses) // _LEAST_IN_A_GROUP)
    parts = np.array_split(np.arange(len(losses)), number) if number >= _FEWEST_GROUPS and math.isfinite(loss) else []
    groups = [[float(losses[part].sum()), int(counts[part].sum())] for part in parts]
    return math.exp(loss) if loss < _LARGEST_LOG else math.inf, groups


def mean_loss(
    model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None, called: str = "these records"
) -> float:
    """Total negative log-likelihood (nats) over the number of predicted tokens that count, in eval mode.

    Of a classifier, that of the labels, over the number of records.

    An aggregate of the records: private if they are.

    Args:
        model: causal language model or classifier; its training mode is restored.
        tokens: the records.
        rows: physical batch size.
        autocast: dtype of the forward pass.
        called: what messages call the records.

    Raises: ConfigError if no token of any record counts.
    """
    if is_classifier(model):
        return score_classifier(model, tokens, rows, autocast=autocast).loss
    losses, counts = record_losses(model, tokens, rows, autocast=autocast)
    if not counts.sum():
        problem = f"leaves no token of {called} that counts in the loss"
        raise ConfigError("training.max_length", problem, fix="raise it, or give records with shorter prompts")
    return float(losses.sum() / counts.sum())


@torch.no_grad()
def record_losses(
    model: Any, tokens: Tokens, rows: int, *, autocast: torch.dtype | None = None, label: str = ""
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Each record's negative log-likelihood in nats, and its number of predicted tokens that count. Private.

    Args:
        model, tokens, rows, autocast: as ``mean_loss`` takes them.
        label: what the meter of progress says; empty shows none.

    Returns: (records,) losses and (records,) counts.
    """
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    found, counts = np.zeros(len(tokens.rows)), np.zeros(len(tokens.rows), dtype=np.int64)
    # Records of like length together: less padding, and the sum does not depend on the order.
    order = np.argsort([len(row) for row in tokens.rows], kind="stable")
    starts = range(0, len(order), rows)
    for start in progress(starts, label, total=len(starts)) if label else starts:
        chosen = order[start : start + rows]
        ids, mask = tokens.compact(chosen, device)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(input_ids=ids, attention_mask=attention_mask(mask), use_cache=False).logits
        losses, valid = token_losses(logits, ids, mask)
        found[chosen] = losses.double().sum(dim=1).cpu().numpy()
        counts[chosen] = valid.sum(dim=1).cpu().numpy()
    for module, mode in modes:
        module.training = mode
    return found, counts


# Perplexity of texts that are read in blocks of tokens, as papers on language models report it.


@dataclass(frozen=True)
class BlockScores:
    """How well a model predicts texts. Aggregates of the texts: private if they are.

    Attributes:
        perplexity: exp of the mean loss over all predicted tokens.
        perplexity_per_block: mean over blocks of exp(a block's mean loss).
        bits_per_byte: the mean loss in bits, times the tokens over the bytes (UTF-8) of the texts, so that a token that
            is not predicted counts as the mean. It alone can be compared between models with different tokenizers.
    """

    perplexity: float
    perplexity_per_block: float
    bits_per_byte: float


def in_blocks(tokens: Tokens, size: int) -> Tokens:
    """Every record's tokens in blocks of ``size``, of which a record's last one may be shorter; none holds two records.

    Raises: ConfigError for a size that leaves nothing to predict.
    """
    if size < 2:
        raise ConfigError("block", f"{size} tokens leave nothing to predict", fix="give 2 or more")
    rows = [row[start : start + size] for row in tokens.rows for start in range(0, len(row), size)]
    return replace(tokens, rows=rows, width=size + 1)


def beginning(tokens: Tokens, tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before every text; None if it puts none."""
    begin = tokenizer.bos_token_id
    return begin if begin is not None and all(int(row[0]) == begin for row in tokens.rows) else None


def score_blocks(
    model: Any, blocks: Tokens, texts: Sequence[str], rows: int, *, begins: int | None = None, label: str = ""
) -> BlockScores:
    """Score a causal model on blocks, each read alone: of a block all tokens are predicted but the first.

    Args:
        blocks: as ``in_blocks`` makes them of ``texts``.
        rows: blocks of a batch.
        begins: the token that stands at the beginning of a text, for none of its bytes; None without one.
        label: what the meter of progress says; empty shows none.

    Raises: ConfigError if no block has two tokens.
    """
    losses, counts = record_losses(model, blocks, rows, label=label)
    if not counts.sum():
        raise ConfigError("data", "no text has two tokens, so nothing is predicted", fix="give longer texts")
    predicted, mean = counts > 0, float(losses.sum() / counts.sum())
    tokens = sum(len(row) - (begins is not None and int(row[0]) == begins) for row in blocks.rows)
    tokens_per_byte = tokens / sum(len(text.encode()) for text in texts)
    with np.errstate(over="ignore"):  # a token of probability 0 makes it infinite
        per_block = float(np.exp(losses[predicted] / counts[predicted]).mean())
        return BlockScores(float(np.exp(mean)), per_block, mean / math.log(2) * tokens_per_byte)
