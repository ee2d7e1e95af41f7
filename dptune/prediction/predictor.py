"""Answers within a budget: one token at a time, each charged to a ledger on disk before it is computed.

A caller sees the token. The slot and the branch that it came from stay hidden: the public model and one private one
run in every pass, in one batch of two rows, and both distributions are drawn from. The guarantee counts every token
that was charged, the end-of-text token included, whether or not it reached anybody. Randomness is the operating
system's; the draw is exact up to the rounding of float64 sums.

Perplexity of a protocol by teacher forcing: the probability of every true next token under the output law.

Records are scored one by one, so that processes can share them, and summed up at the end.

Two averages, never mixed up: ``perplexity_per_block`` is the mean over records of exp(mean loss of the record), as
PMixED's paper reports (its blocks are 512 tokens, ours are records); ``perplexity_pooled`` is exp of the mean loss over
all tokens. Perplexity charges nothing: scoring reads held-out records and gives an aggregate of private models, which
the guarantee of the answers does not cover.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom

from dptune.core.errors import ConfigError
from dptune.core.progress import progress
from dptune.prediction.mixture import (
    moment_weights,
    parts_of,
    pointwise_weights,
    renyi_weights,
    token_at,
    truncate_laws,
)
from dptune.prediction.protocols import FixedMixture, Protocol, Published, planned_answers
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import Entropy, uniform
from dptune.privacy.ledger import Ledger
from dptune.training.data import Tokens, plain_ids
from dptune.training.gradients.stacked_adapters import PUBLIC, StackedAdapters
from dptune.training.models.causal import most_positions


@dataclass(frozen=True)
class Answer:
    """Token of an answer, and the budget after it. Public.

    Attributes:
        token: id of the token.
        tokens_left: number of tokens that may still be answered.
        epsilon_spent: epsilon of all tokens so far.
        delta: delta of ``epsilon_spent``.
        unit: unit of privacy of ``epsilon_spent``: "shard", "record" or a column of units.
    """

    token: int
    tokens_left: int
    epsilon_spent: float
    delta: float
    unit: str


class PrivatePredictor:
    """Answers prompts until its tokens are spent, and refuses afterwards. Safe to call from many threads."""

    def __init__(
        self,
        model: Any,
        adapters: StackedAdapters,
        protocol: FixedMixture,
        ledger: Ledger | None,
        entropy: Entropy,
        remember: Callable[[Ledger], None] = lambda ledger: None,
    ) -> None:
        """Answer from an open ledger; None means that all tokens are spent, see ``deployment.open_ledger``.

        ``remember`` is called after every charge, so that an older copy of the ledger is detected.
        """
        if len(adapters) != protocol.models:
            problem = f"the ensemble has {len(adapters)} slots, the protocol {protocol.models}"
            raise ConfigError("prediction.models", problem, fix="give the protocol the ensemble's number")
        self.protocol = protocol
        self._model, self._adapters, self._ledger, self._entropy = model.eval(), adapters, ledger, entropy
        self._remember, self._lock = remember, threading.Lock()

    @property
    def tokens_spent(self) -> int:
        """Number of tokens charged so far."""
        ledger = self._ledger
        return self.protocol.tokens if ledger is None else ledger.releases

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of all tokens charged so far, at ``protocol.delta``."""
        count = self.tokens_spent
        return smallest_epsilon(planned_answers(self.protocol, count), self.protocol.delta) if count else 0.0

    def answer(self, context: Sequence[int]) -> Answer:
        """Answer with the next token after ``context``, one token id or more; the model sees the last that fit.

        Guarantee: all answers together are (epsilon, delta)-DP as the protocol says, for prompts of any kind that may
        follow from earlier answers.

        Raises: BudgetError when every token is spent; ConfigError for a context that is empty or holds no token of the
            model's; nothing is charged then.
        """
        if not context:
            raise ConfigError("prompt", "is empty", fix="give it some text")
        tokens = self._model.get_input_embeddings().weight.shape[0]
        if not all(0 <= token < tokens for token in context):  # the model would fail after the charge
            problem = f"holds a token that the model has no embedding for (it has {tokens})"
            raise ConfigError("prompt", problem, fix="serve the ensemble with the tokenizer of its base")
        with self._lock:
            if self._ledger is None:
                raise BudgetError(
                    f"all {self.protocol.tokens} tokens are spent, and with them epsilon {self.protocol.epsilon:g}. "
                    "Fix: none; a new budget needs the consent of those in the data."
                )
            self._ledger.charge(self.protocol.release)
            self._remember(self._ledger)
            left = self.protocol.tokens - self._ledger.releases
            if left == 0:
                self._ledger.finish()
                self._ledger = None
            token = self._draw(context)
            return Answer(token, left, self.epsilon_spent, self.protocol.delta, self.protocol.unit)

    def generate(self, context: Sequence[int], most: int, end: int | None = None) -> Iterator[Answer]:
        """Answer up to ``most`` tokens one after the other, each with its own charge; stop after token ``end``."""
        ids = list(context)
        for _ in range(most):
            given = self.answer(ids)
            yield given
            if given.token == end:
                return
            ids.append(given.token)

    def close(self) -> None:
        """Close the ledger and release its lock."""
        with self._lock:
            if self._ledger is not None:
                self._ledger.close()

    @torch.no_grad()
    def _draw(self, context: Sequence[int]) -> int:
        pick, coin, *places = (float(value) for value in uniform(self._entropy, 4))
        slot = min(int(pick * self.protocol.models), self.protocol.models - 1)
        public, private = truncate_laws(*next_log_probabilities(self._model, self._adapters, context, [PUBLIC, slot]))
        weight = float(weights_of(self.protocol, public[None], private[None, None], steady=True))
        tokens = [token_at(law.exp(), place) for law, place in zip((public, private), places, strict=True)]
        return tokens[coin < (1 - self.protocol.public_weight) * weight]


@torch.no_grad()
def next_log_probabilities(
    model: Any, adapters: StackedAdapters, context: Sequence[int], rows: Sequence[int]
) -> torch.Tensor:
    """(rows, vocabulary) float64 log-probabilities of the next token, from the adapters that ``rows`` name."""
    device = next(model.parameters()).device
    most = most_positions(model) or len(context)
    ids = torch.tensor([list(context[-most:])], device=device).expand(len(rows), -1)
    with adapters.apply(model, torch.tensor(rows, device=device)):
        mask = torch.ones_like(ids)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits
    return torch.log_softmax(logits[:, -1].double(), dim=-1)


def weights_of(
    protocol: FixedMixture, log_public: torch.Tensor, log_private: torch.Tensor, *, steady: bool = False
) -> torch.Tensor:
    """(models, positions) weights lambda that the protocol allows for its unit of privacy. Private."""
    share = protocol.slots.share
    if protocol.unit == "shard":
        return renyi_weights(log_public, log_private, protocol.alpha, protocol.excess, share, steady=steady)
    return moment_weights(log_public, log_private, int(protocol.alpha), protocol.excess, share, steady=steady)


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
