"""Scores of a classifier on a set of records: accuracy, F1, calibration and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.training.data import Tokens
from dptune.training.losses import label_logits
from dptune.training.models.causal import evaluation_mode

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
