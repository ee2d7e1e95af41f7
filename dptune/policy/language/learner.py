"""What users of a language model compute: a continuation, its reward, and an update from both."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dptune.errors import ConfigError
from dptune.policy.language.lexicon import Lexicon
from dptune.policy.language.loss import bandit_loss
from dptune.policy.language.policy import LanguagePolicy
from dptune.policy.language.prompts import Prompts
from dptune.policy.language.schedule import Bandit
from dptune.policy.local import Steps, local_updates
from dptune.policy.method import Dppg

USERS, PUBLIC, EVALUATION = 1, 2, 3  # streams of one public seed


@dataclass(frozen=True)
class Rollouts:
    """Private. K users by the tokens of prompt and continuation.

    Attributes:
        ids, mask: (K, prompt + new) tokens; padding on the left, and after a continuation's end.
        counted: (K, new) tokens of the continuation, its end-of-text token included.
        before: (K, new) their log-probabilities under the adapter that sampled them.
        scores: (K,) by the lexicon.
        log_ratios: (K,) mean log-ratio to the base over ``counted``.
        rewards: (K,) in [-1, 1].
    """

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)
    counted: torch.Tensor = field(repr=False)
    before: torch.Tensor = field(repr=False)
    scores: torch.Tensor = field(repr=False)
    log_ratios: torch.Tensor = field(repr=False)
    rewards: torch.Tensor = field(repr=False)


@dataclass(frozen=True)
class Figures:
    """Rewards of an adapter on public simulated prompts. Public.

    Attributes:
        updates: number of releases that the adapter was made from.
        reward: mean reward, with the penalty.
        score: mean score by the lexicon.
        kl: KL divergence to the base in nats a token, exact at every sampled prefix.
    """

    updates: int
    reward: float
    score: float
    kl: float


class LanguageLearner:
    """The parts of a run that do not change from update to update."""

    def __init__(self, policy: LanguagePolicy, lexicon: Lexicon, method: Dppg, bandit: Bandit) -> None:
        """Raises: ConfigError for a method with a critic: there is one action a user, and nothing to bootstrap."""
        if method.critic != "none":
            raise ConfigError("critic", f"{method.critic!r}: a bandit has none", fix="use critic: none")
        self.policy, self.lexicon, self.method, self.bandit = policy, lexicon, method, bandit
        self.radius = bandit.clip_radius(method.noise_multiplier, policy.factors.size)

    def uniforms(self, stream: int, numbers: list[int]) -> torch.Tensor:
        """(N, new) of what each of these users samples by; each has randomness of their own."""
        seed, length = self.bandit.seed, self.bandit.new_tokens
        rows = [np.random.default_rng([seed, stream, number]).random(length) for number in numbers]
        return torch.from_numpy(np.stack(rows))

    @torch.no_grad()
    def respond(self, vector: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> Rollouts:
        """Everybody's continuation under one adapter, and its reward. Each row is one user's own."""
        ids, mask, counted = self.policy.sample(vector, prompts, uniforms)
        count = counted.shape[1]
        before, base = (self.policy.log_probabilities(it, ids, mask, count) for it in (vector[None], None))
        log_ratios = ((before - base) * counted).sum(dim=1) / counted.sum(dim=1)
        said = [row[kept].tolist() for row, kept in zip(ids[:, -count:], counted, strict=True)]
        texts = self.policy.tokenizer.batch_decode(said, skip_special_tokens=True)
        scores = torch.tensor([self.lexicon.score(text) for text in texts])
        rewards = (scores - self.bandit.kl_weight * log_ratios.cpu()).clamp(-1, 1)
        return Rollouts(ids, mask, counted, before, scores, log_ratios.cpu(), rewards)

    def updates(
        self, vector: torch.Tensor, rollouts: Rollouts, baseline: float, present: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(K, size) each user's own update from the released adapter, of length ``radius`` at most. Private.

        Args:
            baseline: the reward that others are compared with; public.
            present: (K,) whether there is a user at all; the update of nobody is zero. None is everybody.
        """
        bandit = self.bandit
        steps = Steps(bandit.learning_rate, bandit.epochs, 1, self.radius)
        gains = (rollouts.rewards - baseline).to(rollouts.ids.device)
        data = (rollouts.ids, rollouts.mask, rollouts.counted, rollouts.before, gains)
        present = torch.ones(len(gains), dtype=torch.bool) if present is None else present
        # One action each: the rows of local_updates are whole continuations, in a dimension of their own.
        return local_updates(
            bandit_loss(self.policy, bandit.prompt_weight),
            vector,
            tuple(part[:, None] for part in data),
            present[:, None],
            steps,
            torch.Generator(),  # the order of one row
        )

    def simulated(self, vector: torch.Tensor, public: Prompts, number: int) -> Rollouts:
        """What simulated users do at update ``number``; their mean reward is the baseline.

        It is public. The users' own mean is not: through it, each user would move all others' updates.
        """
        users = [number * len(public) + row for row in range(len(public))]
        return self.respond(vector, public, self.uniforms(PUBLIC, users))

    @torch.no_grad()
    def evaluate(self, vector: torch.Tensor, public: Prompts, updates: int) -> Figures:
        """On simulated prompts that belong to no user; the same samples' randomness at every call."""
        rollouts = self.respond(vector, public, self.uniforms(EVALUATION, list(range(len(public)))))
        count = rollouts.counted.shape[1]
        tuned, base = (
            self.policy.logits(it, rollouts.ids, rollouts.mask, count + 1)[:, :-1].double().log_softmax(dim=-1)
            for it in (vector[None], None)
        )
        kl = (tuned.exp() * (tuned - base)).sum(dim=-1)
        mean = (kl * rollouts.counted).sum() / rollouts.counted.sum()
        return Figures(updates, float(rollouts.rewards.mean()), float(rollouts.scores.mean()), float(mean))
