"""Computations of a language model's users: each samples a continuation, gets its reward, and computes an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dptune.core.errors import ConfigError
from dptune.policy.language.policy import LanguagePolicy
from dptune.policy.language.prompts import Prompts
from dptune.policy.language.reward import Reward
from dptune.policy.language.schedule import Bandit
from dptune.policy.local import Loss, Steps, local_updates
from dptune.policy.method import Dppg

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
