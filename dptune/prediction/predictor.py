"""Answers within a budget: one token at a time, each charged to a ledger on disk before it is computed.

A caller sees the token. The slot and the branch that it came from stay hidden: the public model and one private one
run in every pass, in one batch of two rows, and both distributions are drawn from. The guarantee counts every token
that was charged, the end-of-text token included, whether or not it reached anybody. Randomness is the operating
system's; the draw is exact up to the rounding of float64 sums.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dptune.core.errors import ConfigError
from dptune.prediction.mixture import token_at, truncate_laws
from dptune.prediction.mollify import moment_weights, renyi_weights
from dptune.prediction.protocols import FixedMixture, planned_answers
from dptune.privacy.accountants import smallest_epsilon
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.entropy import Entropy, uniform
from dptune.privacy.ledger import Ledger
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
