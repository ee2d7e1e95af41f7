"""Language model as a policy, and the computations of its users.

The model is frozen, with adapters for each row of a batch: it gives log-probabilities and sampled continuations. Each
user samples a continuation, gets its reward, and computes an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.policy.language.prompts import Prompts
from dptune.policy.language.reward import Reward
from dptune.policy.method import Dppg
from dptune.policy.schedules import Bandit
from dptune.policy.user_updates import Loss, Steps, local_updates
from dptune.training.gradients.parameter_groups import lora_pairs
from dptune.training.gradients.stacked_adapters import StackedAdapters
from dptune.training.models.model import attach_lora


class LanguagePolicy:
    """A frozen causal language model whose adapters are arguments of each call, one for each row of a batch."""

    def __init__(self, base: Any, tokenizer: Any, lora: Lora, seed: int) -> None:
        """Take a base model and its tokenizer.

        Args:
            base: causal language model, all of whose weights are frozen, on its device.
            seed: seed of the initial adapters; public.

        Raises: ConfigError for adapters with dropout.
        """
        if lora.dropout:
            raise ConfigError(
                "lora.dropout",
                f"{lora.dropout} makes the probability ratio of unchanged adapters differ from 1",
                fix="use 0",
            )
        self.model, self.tokenizer, self.lora, self._seed = base.eval(), tokenizer, lora, seed
        peft = attach_lora(deepcopy(base), lora, seed)
        self.factors, self.start = Factors.of(peft), flat_adapters(peft)

    @property
    def device(self) -> torch.device:
        """The device of the base model."""
        return next(self.model.parameters()).device

    def peft(self, vector: torch.Tensor) -> Any:
        """Make a PEFT model from a copy of the base and the adapters in ``vector``, (size,), in evaluation mode."""
        peft = attach_lora(deepcopy(self.model), self.lora, self._seed)
        write_adapters(peft, vector)
        return peft.eval()

    def logits(self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        """(rows, keep, vocabulary) float32 logits at the last ``keep`` positions.

        Args:
            vectors: (rows, size) adapters, one for each row, or (1, size) for all rows; None for the base model.
            ids, mask: (rows, tokens) token ids and attention mask, padded on the left.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

        def run() -> torch.Tensor:
            output = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
            return output.logits.float()

        if vectors is None:
            return run()
        with self._with_adapters(vectors, len(ids)):
            return run()

    def log_probabilities(
        self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, count: int
    ) -> torch.Tensor:
        """(rows, count) log-probabilities of the last ``count`` tokens, each given all before it; see ``logits``."""
        logits = self.logits(vectors, ids, mask, count + 1)[:, :-1]
        return logits.log_softmax(dim=-1).gather(-1, ids[:, -count:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, vector: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sample a continuation of each prompt at temperature 1.

        A row depends on its own prompt and random numbers alone. All rows run for all steps, even after their end of
        text, so that neither time nor shapes depend on what they say.

        Args:
            vector: (size,) adapter for all rows.
            uniforms: (rows, new) random numbers in [0, 1).

        Returns: ``ids``, ``mask`` and ``continuation_mask`` as in ``Rollouts``.
        """
        mask, cache = prompts.mask.to(self.device), DynamicCache(config=self.model.config)
        ids, inputs = [prompts.ids.to(self.device)], prompts.ids.to(self.device)
        running = torch.ones(len(mask), dtype=torch.bool, device=self.device)
        columns = []
        with self._with_adapters(vector[None], len(mask)):
            for step in range(uniforms.shape[1]):
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
                logits = self.model(
                    input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache,
                    use_cache=True, logits_to_keep=1,
                ).logits[:, -1]  # fmt: skip
                inputs = _draw_tokens(logits, uniforms[:, step].to(self.device))[:, None]
                inputs = torch.where(running[:, None], inputs, self.tokenizer.pad_token_id)
                ids.append(inputs)
                columns.append(running)
                mask = torch.cat([mask, running[:, None].long()], dim=1)
                running = running & (inputs[:, 0] != self.tokenizer.eos_token_id)
        return torch.cat(ids, dim=1), mask, torch.stack(columns, dim=1)

    def _with_adapters(self, vectors: torch.Tensor, rows: int) -> Any:
        """Context in which the base model applies the adapters in ``vectors`` to a batch of ``rows``."""
        own = torch.arange(rows) if len(vectors) == rows else torch.zeros(rows, dtype=torch.long)
        return self.factors.stack(vectors.to(self.device)).apply(self.model, own.to(self.device))


def _draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw (rows,) tokens by the inverse of each row's cumulative distribution, in float64."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, (uniforms.double() * cumulative[:, -1])[:, None].contiguous(), right=True)
    return tokens.squeeze(-1).clamp(max=logits.shape[-1] - 1)


# LoRA adapters as one flat vector, the vector that is clipped, noised and released.


@dataclass(frozen=True)
class Factors:
    """Layout of adapters in a flat vector: A and then B of each layer in turn.

    Attributes:
        names: name of each layer in the base model.
        shapes: (rank, inputs, outputs) of each layer's adapter.
        scalings: factor that multiplies each layer's B A.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]
    scalings: tuple[float, ...]

    @classmethod
    def of(cls, peft: Any) -> Factors:
        """Read the layout of a PEFT model's adapters."""
        pairs = lora_pairs(peft)
        return cls(
            tuple(pair.name.removeprefix("base_model.model.") for pair in pairs),
            tuple((pair.down.out_features, pair.down.in_features, pair.up.out_features) for pair in pairs),
            tuple(pair.scaling for pair in pairs),
        )

    @property
    def size(self) -> int:
        """Number of trained parameters, d."""
        return sum(rank * (inputs + outputs) for rank, inputs, outputs in self.shapes)

    def stack(self, vectors: torch.Tensor) -> StackedAdapters:
        """Unpack (N, size) vectors into adapters, each for one row of a batch; differentiable."""
        down, up, start = {}, {}, 0
        for name, (rank, inputs, outputs), scaling in zip(self.names, self.shapes, self.scalings, strict=True):
            middle, end = start + rank * inputs, start + rank * (inputs + outputs)
            down[name] = vectors[:, start:middle].view(-1, rank, inputs)
            up[name] = vectors[:, middle:end].view(-1, outputs, rank) * scaling
            start = end
        return StackedAdapters(down, up)


def flat_adapters(peft: Any) -> torch.Tensor:
    """Copy a PEFT model's adapters into one (size,) float32 vector on the CPU, in the order of ``Factors``."""
    return torch.cat([part.detach().flatten() for pair in lora_pairs(peft) for part in pair.parameters]).float().cpu()


def write_adapters(peft: Any, vector: torch.Tensor) -> None:
    """Write a (size,) vector in the order of ``Factors`` into a PEFT model's adapters."""
    parts = [part for pair in lora_pairs(peft) for part in pair.parameters]
    with torch.no_grad():
        for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))


USERS, PUBLIC, EVALUATION = 1, 2, 3  # streams of random numbers under one public seed


@dataclass(frozen=True)
class Rollouts:
    """Prompts, continuations and rewards of K users. Private.

    Attributes:
        ids, mask: (K, prompt + new) token ids and attention mask; padding on the left of a prompt and after the end of
            a continuation.
        continuation_mask: (K, new) whether a token belongs to the continuation, its end-of-text token included.
        old_log_probabilities: (K, new) log-probabilities of the new tokens under the adapter that sampled them.
        scores: (K,) scores of the continuations by the reward, before the KL penalty.
        log_ratios: (K,) mean over the continuation of log pi / pi_base, in nats a token.
        rewards: (K,) scores minus the KL penalty, clipped to [-1, 1].
    """

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)
    continuation_mask: torch.Tensor = field(repr=False)
    old_log_probabilities: torch.Tensor = field(repr=False)
    scores: torch.Tensor = field(repr=False)
    log_ratios: torch.Tensor = field(repr=False)
    rewards: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Figures:
    """Rewards of an adapter on public simulated prompts. Public.

    Attributes:
        updates: number of updates that led to the adapter.
        reward: mean reward, in [-1, 1].
        score: mean score by the reward, before the KL penalty, in [-1, 1].
        kl: mean KL divergence to the base in nats a token, computed from both distributions at every sampled prefix.
    """

    updates: int
    reward: float
    score: float
    kl: float


class LanguageLearner:
    """Policy, reward and schedule of a run, and the computations of one update. It keeps no state between updates."""

    def __init__(self, policy: LanguagePolicy, reward: Reward, method: Dppg, bandit: Bandit) -> None:
        """Take the parts of a run.

        Raises: ConfigError for a method with a critic: a user takes one action only, so there is no later value to
            learn.
        """
        if method.critic != "none":
            raise ConfigError(
                "critic", f"is {method.critic!r}, but a contextual bandit has no critic", fix="use critic: none"
            )
        self.policy, self.reward, self.method, self.bandit = policy, reward, method, bandit
        self.radius = bandit.clip_radius(method.noise_multiplier, policy.factors.size)

    def uniforms(self, stream: int, numbers: Sequence[int]) -> torch.Tensor:
        """Draw (N, new) uniform numbers in [0, 1), from which the users with these numbers sample their tokens.

        A row depends on the public seed, the stream and its user's number alone, so no user moves another's sample.
        """
        seed, length = self.bandit.seed, self.bandit.new_tokens
        rows = [np.random.default_rng([seed, stream, number % 2**64]).random(length) for number in numbers]
        return torch.from_numpy(np.stack(rows))

    @torch.no_grad()
    def respond(self, vector: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> Rollouts:
        """Sample each user's continuation and compute its reward, all under one adapter. Private if prompts are.

        Args:
            vector: (size,) adapter.
            prompts: prompts of K users.
            uniforms: (K, new) random numbers of ``uniforms``.

        Returns: rollouts, each row of which depends on its own user's prompt and random numbers alone.
        """
        ids, mask, continuation = self.policy.sample(vector, prompts, uniforms)
        count = continuation.shape[1]
        logs, base_logs = (self.policy.log_probabilities(vectors, ids, mask, count) for vectors in (vector[None], None))
        log_ratios = ((logs - base_logs) * continuation).sum(dim=1) / continuation.sum(dim=1)
        said, asked = ids[:, -count:], ids[:, :-count]
        scores = self.reward.scores(self._texts(asked, mask[:, :-count].bool()), self._texts(said, continuation))
        rewards = (scores - self.bandit.kl_weight * log_ratios.cpu()).clamp(-1, 1)
        return Rollouts(ids, mask, continuation, logs, scores, log_ratios.cpu(), rewards)

    def _texts(self, ids: torch.Tensor, valid: torch.Tensor) -> list[str]:
        tokens = [row[own].tolist() for row, own in zip(ids, valid, strict=True)]
        texts: list[str] = self.policy.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts

    def updates(
        self, vector: torch.Tensor, rollouts: Rollouts, baseline: float, present: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute each user's update of the released adapter, from their own rollout. Private.

        Args:
            vector: (size,) released adapter.
            baseline: reward that is subtracted from each user's; public.
            present: (K,) whether the user takes part; the update of one who does not is zero. None: all do.

        Returns: (K, size) updates of l2 norm at most ``self.radius``.
        """
        bandit = self.bandit
        steps = Steps(bandit.learning_rate, bandit.epochs, 1, self.radius)
        gains = (rollouts.rewards - baseline).to(rollouts.ids.device)
        rows = (rollouts.ids, rollouts.mask, rollouts.continuation_mask, rollouts.old_log_probabilities, gains)
        present = torch.ones(len(gains), dtype=torch.bool) if present is None else present
        # A user's trajectory is one action, the whole continuation: local_updates gets T = 1 rows a user.
        return local_updates(
            bandit_loss(self.policy, bandit.prompt_weight),
            vector,
            tuple(part[:, None] for part in rows),
            present[:, None],
            steps,
            torch.Generator(),  # not used: a single row has only one order
        )

    def simulate(self, vector: torch.Tensor, public: Prompts, number: int) -> Rollouts:
        """Roll out simulated users at update ``number``. Their mean reward is the update's baseline. Public.

        The mean reward of the users themselves would be private: through it, one user would move all others' updates.
        """
        numbers = [number * len(public) + row for row in range(len(public))]
        return self.respond(vector, public, self.uniforms(PUBLIC, numbers))

    @torch.no_grad()
    def evaluate(self, vector: torch.Tensor, public: Prompts, updates: int) -> Figures:
        """Evaluate an adapter, (size,), on simulated prompts of no user, with the same random numbers at every call.

        Args:
            updates: number of updates that led to the adapter.
        """
        rollouts = self.respond(vector, public, self.uniforms(EVALUATION, list(range(len(public)))))
        mask = rollouts.continuation_mask
        logs, base_logs = (
            self.policy.logits(vectors, rollouts.ids, rollouts.mask, mask.shape[1] + 1)[:, :-1]
            .double()
            .log_softmax(dim=-1)
            for vectors in (vector[None], None)
        )
        kl = (logs.exp() * (logs - base_logs)).sum(dim=-1)
        mean = (kl * mask).sum() / mask.sum()
        return Figures(updates, float(rollouts.rewards.mean()), float(rollouts.scores.mean()), float(mean))


# Local loss of a user whose one action is the whole continuation of a prompt.


def bandit_loss(policy: LanguagePolicy, prompt_weight: float = 0.0) -> Loss:
    """Make the loss: minus the mean over a continuation's tokens of pi / pi_old * A, plus the prompt's weighted loss.

    The loss takes the fields ``ids``, ``mask``, ``continuation_mask`` and ``old_log_probabilities`` of ``Rollouts``,
    and advantages A; each has a dimension of length 1 after the users', for their one action.

    Args:
        prompt_weight: weight of the mean negative log-likelihood of the prompt's own tokens.
    """

    def loss(vectors: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        ids, mask, continuation, old_logs, gains = (part[:, 0] for part in rows)
        new = continuation.shape[1]
        logs = policy.log_probabilities(vectors, ids, mask, ids.shape[1] - 1 if prompt_weight else new)
        ratios = (logs[:, -new:] - old_logs).exp()
        total = -(ratios * continuation).sum(dim=1) / continuation.sum(dim=1) * gains
        if prompt_weight:
            # The first token is left out: nothing precedes it, so the model does not predict it.
            prompt = (mask[:, 1:] * mask[:, :-1])[:, :-new]
            likelihoods = (logs[:, : prompt.shape[1]] * prompt).sum(dim=1)
            total = total - prompt_weight * likelihoods / prompt.sum(dim=1).clamp(min=1)
        return total * weights[:, 0].to(total.device)

    return loss
