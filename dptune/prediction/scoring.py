"""Perplexity of a protocol by teacher forcing: the probability of every true next token under the output law.

Two averages, never mixed up: ``perplexity_per_block`` is the mean over records of exp(mean loss of the record), as
PMixED's paper reports (its blocks are 512 tokens, ours are records); ``perplexity_pooled`` is exp of the mean loss over
all tokens. Nothing is charged: scoring reads held-out records and tells an aggregate of private models, which the
guarantee of the answers does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from dptune.prediction.mixture import parts_of, truncate_laws
from dptune.prediction.mollify import renyi_weights
from dptune.prediction.predictor import weights_of
from dptune.prediction.protocols import FixedMixture, Protocol, Published
from dptune.progress import progress
from dptune.training.data import Tokens, plain_ids
from dptune.training.stacked import PUBLIC, StackedAdapters

_NEVER = 1e-6  # probability below which a size of the sample is left out: it hardly changes a perplexity


@dataclass
class Losses:
    """Losses of one law, record by record, in nats."""

    total: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)

    def add(self, losses: torch.Tensor) -> None:
        """Add the (tokens,) losses of one record."""
        self.total.append(float(losses.sum()))
        self.count.append(len(losses))

    @property
    def figures(self) -> dict[str, float]:
        """Both perplexities, by name."""
        means = [total / count for total, count in zip(self.total, self.count, strict=True)]
        with np.errstate(over="ignore"):  # a token of probability 0 makes it infinite
            per_block, pooled = np.exp(means).mean(), np.exp(sum(self.total) / sum(self.count))
        return {"perplexity_per_block": float(per_block), "perplexity_pooled": float(pooled)}


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

    def probabilities_at_targets(self, parts: torch.Tensor) -> torch.Tensor:
        """(positions,) probabilities of the true tokens, if private models have ``parts`` (models, positions) each."""
        return (parts * self.at_targets(self.private)).sum(0) + (1 - parts.sum(0)) * self.at_targets(self.public)


@torch.no_grad()
def score_model(model: Any, tokens: Tokens) -> dict[str, float]:
    """Both perplexities of one model, in evaluation mode, of the tokens that count in the loss."""
    losses, model = Losses(), model.eval()
    for row in tokens.rows:
        ids, counted = _row(row, next(model.parameters()).device)
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        law = torch.log_softmax(logits[0, :-1].double(), -1)
        losses.add(-law.gather(-1, ids[0, 1:, None])[counted, 0])
    return losses.figures


def score_ensemble(
    model: Any, adapters: StackedAdapters, tokens: Tokens, protocols: Mapping[str, Protocol], seed: int
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Score protocols on held-out records.

    Returns: the perplexities of each protocol and the mean weight of its private models, by name; and the perplexities
    of the plain average of all private models, which is NOT private: the best a protocol could reach.

    A published protocol has two more perplexities, ``sampled_...``: with one sample of models at every position, as its
    authors score it; by Jensen's inequality that is above the perplexity of the law, which a user meets.

    Args:
        tokens: held-out records, of each of which a token after the first counts in the loss.
        seed: seed of those samples; public.
    """
    losses = {name: Losses() for name in protocols}
    sampled = {name: Losses() for name, protocol in protocols.items() if isinstance(protocol, Published)}
    private: dict[str, list[torch.Tensor]] = {name: [] for name in protocols}
    draws, average = np.random.default_rng(seed), Losses()
    for record in _records(model, adapters, tokens):
        for name, protocol in protocols.items():
            if isinstance(protocol, FixedMixture):
                parts = parts_of(weights_of(protocol, record.public, record.private), protocol.slots)
            else:
                by_size = _published_weights(protocol, record)
                parts = _average_parts(protocol, by_size)
                sampled[name].add(-record.probabilities_at_targets(_sampled_parts(protocol, by_size, draws)).log())
            losses[name].add(-record.probabilities_at_targets(parts).log())
            private[name].append(parts.sum(0))
        average.add(-record.at_targets(record.private).mean(0).log())
    found = {name: each.figures for name, each in losses.items()}
    for name, weights in private.items():
        found[name]["private_weight"] = float(torch.cat(weights).mean())
    for name, each in sampled.items():
        found[name] |= {f"sampled_{key}": value for key, value in each.figures.items()}
    return found, average.figures


@torch.no_grad()
def _records(model: Any, adapters: StackedAdapters, tokens: Tokens) -> Iterator[_Record]:
    """Yield each record's probabilities, by one forward pass over the public model and all private ones."""
    model.eval()
    device = next(model.parameters()).device
    rows = torch.tensor([PUBLIC, *range(len(adapters))], device=device)
    with adapters.apply(model, rows):
        for row in progress(tokens.rows, "scoring answers", total=len(tokens.rows)):
            one, counted = _row(row, device)
            ids = one.expand(len(rows), -1)
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            laws = torch.log_softmax(logits[:, :-1].double(), -1)[:, counted]
            yield _Record(*truncate_laws(laws[0], laws[1:]), ids[0, 1:][counted])


def _row(row: NDArray[np.int32], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, tokens) ids of a record, and (tokens - 1,) whether each token after the first counts, on the device."""
    ids = torch.from_numpy(plain_ids(row).astype(np.int64))[None]
    return ids.to(device), torch.from_numpy(row[1:] >= 0).to(device)


def _published_weights(protocol: Published, record: _Record) -> dict[int, torch.Tensor]:
    """The (models, positions) weights by the size of the sample; sizes rarer than ``_NEVER`` are left out."""
    sizes = [protocol.models] if protocol.subsample == 1 else range(1, protocol.models + 1)
    likely = [size for size in sizes if binom.pmf(size, protocol.models, protocol.subsample) > _NEVER]
    radii = {size: protocol.radii[size - 1] for size in likely}
    excess = {size: math.expm1((protocol.alpha - 1) * radius) for size, radius in radii.items()}
    return {size: renyi_weights(record.public, record.private, protocol.alpha, limit) for size, limit in excess.items()}


def _average_parts(protocol: Published, by_size: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The exact output law, for a secret sample: the mean over its sizes (spec pmixed.md, section 5.2)."""
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
