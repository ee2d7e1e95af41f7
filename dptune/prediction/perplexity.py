"""Perplexity of a protocol by teacher forcing: the probability of every true next token under the output law.

Records are scored one by one, so that processes can share them, and summed up at the end.

Two averages, never mixed up: ``perplexity_per_block`` is the mean over records of exp(mean loss of the record), as
PMixED's paper reports (its blocks are 512 tokens, ours are records); ``perplexity_pooled`` is exp of the mean loss over
all tokens. Nothing is charged: scoring reads held-out records and tells an aggregate of private models, which the
guarantee of the answers does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from dptune.core.progress import progress
from dptune.prediction.mixture import parts_of, truncate_laws
from dptune.prediction.mollify import pointwise_weights, renyi_weights
from dptune.prediction.predictor import weights_of
from dptune.prediction.protocols import FixedMixture, Protocol, Published
from dptune.training.data import Tokens, plain_ids
from dptune.training.gradients.stacked_adapters import PUBLIC, StackedAdapters

Rows = Sequence[NDArray[np.int32]]
_NEVER = 1e-6  # probability below which a size of the sample is left out: it hardly changes a perplexity


@dataclass(frozen=True)
class _Record:
    """Log-probabilities at one record's positions, and the true next tokens.

    Attributes:
        public: (positions, vocabulary) of the public model.
        private: (models, positions, vocabulary) of the private models.
        targets: (positions,) ids of the true next tokens.
    """

    public: torch.Tensor
    private: torch.Tensor
    targets: torch.Tensor

    def at_targets(self, log_law: torch.Tensor) -> torch.Tensor:
        """(..., positions) probabilities of the true next tokens."""
        index = self.targets.expand(log_law.shape[:-1])[..., None]
        return log_law.gather(-1, index)[..., 0].exp()

    def loss(self, parts: torch.Tensor) -> float:
        """Loss of the true tokens, in nats, if private models have ``parts`` (models, positions) of the law."""
        law = (parts * self.at_targets(self.private)).sum(0) + (1 - parts.sum(0)) * self.at_targets(self.public)
        return -float(law.log().sum())


@torch.no_grad()
def score_model(model: Any, tokens: Tokens) -> dict[str, float]:
    """Both perplexities of one model, in evaluation mode, of the tokens that count in the loss."""
    losses, model = [], model.eval()
    for row in tokens.rows:
        ids, counted = _row(row, next(model.parameters()).device)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        law = torch.log_softmax(logits[0, :-1].double(), -1)
        lost = -law.gather(-1, ids[0, 1:, None])[counted, 0]
        losses.append((float(lost.sum()), len(lost)))
    return _perplexities(losses)


@dataclass(frozen=True)
class RecordScore:
    """What one record's tokens cost under each law. Of private models, and of a held-out record.

    Attributes:
        tokens: number of tokens that count in the loss.
        losses: by protocol, in nats, summed over those tokens.
        sampled: losses with one sample of models at every position, by published protocol.
        private: weight of the private models summed over those tokens, by protocol.
        average: loss under the plain average of all private models.
    """

    tokens: int
    losses: Mapping[str, float]
    sampled: Mapping[str, float]
    private: Mapping[str, float]
    average: float


def score_records(
    model: Any,
    adapters: StackedAdapters,
    tokens: Tokens,
    protocols: Mapping[str, Protocol],
    seed: int,
    chosen: Sequence[int],
    label: str = "scoring answers",
) -> Iterator[tuple[int, RecordScore]]:
    """Yield the number and the score of each ``chosen`` record, as soon as it is scored.

    Args:
        tokens: held-out records, of each of which a token after the first counts in the loss.
        seed: with the record's number the seed of a published protocol's samples; public.
        chosen: numbers of records.
        label: what the progress bar says.
    """
    rows = [tokens.rows[number] for number in chosen]
    for number, record in zip(chosen, _records(model, adapters, rows, label), strict=True):
        draws, losses, sampled, private = np.random.default_rng([seed, number]), {}, {}, {}
        cut = _Record(*truncate_laws(record.public, record.private), record.targets)
        for name, protocol in protocols.items():
            if isinstance(protocol, FixedMixture):
                laws, parts = cut, parts_of(weights_of(protocol, cut.public, cut.private), protocol.slots)
            else:  # Algorithm 1 has the whole vocabulary
                by_size = _published_weights(protocol, record)
                laws, parts = record, _average_parts(protocol, by_size)
                sampled[name] = record.loss(_sampled_parts(protocol, by_size, draws))
            losses[name] = laws.loss(parts)
            private[name] = float(parts.sum())
        average = -float(cut.at_targets(cut.private).mean(0).log().sum())
        yield number, RecordScore(len(record.targets), losses, sampled, private, average)


def summed_up(scores: Sequence[RecordScore]) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The perplexities of protocols on all records.

    Returns: the perplexities of each protocol and the mean weight of its private models, by name; and the perplexities
    of the plain average of all private models, which is NOT private: the best a protocol could reach.

    A published protocol has two more perplexities, ``sampled_...``: with one sample of models at every position, as its
    authors score it; by Jensen's inequality that is above the perplexity of the law, which a user meets.
    """
    tokens = sum(score.tokens for score in scores)
    found: dict[str, dict[str, float]] = {}
    for name in scores[0].losses:
        found[name] = _perplexities([(score.losses[name], score.tokens) for score in scores])
        found[name]["private_weight"] = sum(score.private[name] for score in scores) / tokens
    for name in scores[0].sampled:
        of_samples = _perplexities([(score.sampled[name], score.tokens) for score in scores])
        found[name] |= {f"sampled_{key}": value for key, value in of_samples.items()}
    return found, _perplexities([(score.average, score.tokens) for score in scores])


@torch.no_grad()
def _records(model: Any, adapters: StackedAdapters, rows: Rows, label: str) -> Iterator[_Record]:
    """Yield each record's probabilities, by one forward pass over the public model and all private ones."""
    model.eval()
    device = next(model.parameters()).device
    models = torch.tensor([PUBLIC, *range(len(adapters))], device=device)
    with adapters.apply(model, models):
        for row in progress(rows, label, total=len(rows)):
            one, counted = _row(row, device)
            ids = one.expand(len(models), -1)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            laws = torch.log_softmax(logits[:, :-1].double(), -1)[:, counted]
            laws = torch.where(laws.isnan().any(-1, keepdim=True), laws[0], laws)  # a broken model counts as the public
            yield _Record(laws[0], laws[1:], ids[0, 1:][counted])


def _perplexities(losses: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Both perplexities, by name, of records' losses in nats and numbers of tokens."""
    means = [total / count for total, count in losses]
    pooled = sum(total for total, _ in losses) / sum(count for _, count in losses)
    with np.errstate(over="ignore"):  # a token of probability 0 makes it infinite
        return {"perplexity_per_block": float(np.exp(means).mean()), "perplexity_pooled": float(np.exp(pooled))}


def _row(row: NDArray[np.int32], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, tokens) ids of a record, and (tokens - 1,) whether each token after the first counts, on the device."""
    ids = torch.from_numpy(plain_ids(row).astype(np.int64))[None]
    return ids.to(device), torch.from_numpy(row[1:] >= 0).to(device)


def _published_weights(protocol: Published, record: _Record) -> dict[int, torch.Tensor]:
    """The (models, positions) weights by the size of the sample; sizes rarer than ``_NEVER`` are left out."""
    sizes = [protocol.models] if protocol.subsample == 1 else range(1, protocol.models + 1)
    likely = [size for size in sizes if binom.pmf(size, protocol.models, protocol.subsample) > _NEVER]
    radii = {size: protocol.radii[size - 1] for size in likely}
    if math.isinf(protocol.alpha):
        return {size: pointwise_weights(record.public, record.private, radius) for size, radius in radii.items()}
    excess = {size: math.expm1((protocol.alpha - 1) * radius) for size, radius in radii.items()}
    return {size: renyi_weights(record.public, record.private, protocol.alpha, limit) for size, limit in excess.items()}


def _average_parts(protocol: Published, by_size: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The exact output law, for a secret sample: the mean over its sizes, of the paper's section 5.2."""
    likely = {size: binom.pmf(size, protocol.models, protocol.subsample) for size in by_size}
    return torch.stack([likely[size] * weights for size, weights in by_size.items()]).sum(0) / protocol.models


def _sampled_parts(
    protocol: Published, by_size: Mapping[int, torch.Tensor], draws: np.random.Generator
) -> torch.Tensor:
    """The weights of private models under one drawn sample for every position."""
    models, positions = next(iter(by_size.values())).shape
    parts = torch.zeros(models, positions, dtype=torch.float64)
    for place in range(positions):
        chosen = np.flatnonzero(draws.random(models) < protocol.subsample)
        if protocol.with_replacement:
            chosen = draws.choice(models, len(chosen))
        for model in chosen if len(chosen) in by_size else ():
            parts[model, place] += float(by_size[len(chosen)][model, place]) / len(chosen)
    return parts.to(next(iter(by_size.values())).device)
