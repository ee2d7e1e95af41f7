"""Reinforcement learning from a reward in small: a language model as a policy, one prompt and one continuation a user.

rollouts  = respond(released adapter, prompts)          # K users, each once, each with a sample of their own
updates   = clip(what each user computes from their own rollout and released values)
ledger.charge(method.release(number))                   # on disk before the noisy value exists
adapter  += server_step * (mean of the updates + noise)

A contextual bandit: one action a user, the whole continuation, so there is no critic. Only LoRA adapters are trained,
on a frozen public base. The reward is a public function; private are prompts, and what is sampled from them
(spec dp-policy-gradient.md, section 7).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from dptune.errors import ConfigError
from dptune.files import write_json
from dptune.policy.aggregate import noisy_means
from dptune.policy.lexicon import Lexicon
from dptune.policy.local import Loss, Steps, local_updates
from dptune.policy.method import NAME, Dppg
from dptune.policy.opening import digest_of, is_finished, open_ledger, save_state
from dptune.policy.rollout import Met
from dptune.policy.trust_region import Update, l2_radius
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Ledger
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.progress import progress
from dptune.training.model import Lora, attach_lora
from dptune.training.per_sample import lora_pairs
from dptune.training.stacked import StackedAdapters

USERS, PUBLIC, EVALUATION = 1, 2, 3  # streams of one public seed


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """The public schedule of a run.

    Attributes:
        users: K, prompts an update.
        updates: releases to make.
        prompt_tokens: length to which every prompt is cut or padded: one user's text must not change others' shapes.
        new_tokens: largest number of tokens of a continuation.
        kl_weight: beta, weight of the mean log-ratio to the base in the reward.
        learning_rate: learning rate of the local Adam steps.
        epochs: local steps a user, each on the whole continuation.
        radius: S, clip radius of a user's update; None takes that of the trust region.
        trust, miss: the noisy step leaves ||step||^2 / 2 <= trust with probability ``miss`` at most.
        server_step: factor that multiplies the released mean.
        prompt_weight: weight of the likelihood of the user's own prompt in the local loss (PPO-ptx, Ouyang et al. 2022,
            with private text). Makes the model memorise prompts as fast as ``radius`` allows: for audits.
        evaluate_every: updates between points of the curve.
        seed: seed of initial adapters and of all samples; public.
    """

    users: int = 128
    updates: int = 24
    prompt_tokens: int = 32
    new_tokens: int = 24
    kl_weight: float = 0.2
    learning_rate: float = 1e-2
    epochs: int = 2
    radius: float | None = None
    trust: float = 0.2
    miss: float = 0.1
    server_step: float = 1.0
    prompt_weight: float = 0.0
    evaluate_every: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "updates", "prompt_tokens", "new_tokens", "epochs", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use 1 or more")
        for name in ("learning_rate", "server_step", *(("radius",) if self.radius is not None else ())):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is not positive", fix="use its default")
        for name in ("kl_weight", "prompt_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(name, f"{getattr(self, name)} is negative", fix="use 0 or more")

    def clip_radius(self, noise_multiplier: float, dimension: int) -> float:
        """S: as given, or the largest that keeps a noisy step in the trust region (proposition 4.4)."""
        if self.radius is not None:
            return self.radius
        if not noise_multiplier:  # the law's limit
            return math.sqrt(2 * self.trust) / self.server_step
        return l2_radius(Update(self.server_step, noise_multiplier, dimension, self.users), self.trust, self.miss)


@dataclass(frozen=True)
class Prompts:
    """Private, unless simulated. (N, width) ids and mask, padded on the left; a row has a token at least."""

    ids: torch.Tensor = field(repr=False)
    mask: torch.Tensor = field(repr=False)

    @classmethod
    def of(cls, texts: list[str], tokenizer: Any, width: int) -> Prompts:
        """The first ``width`` tokens of every text.

        The first of width + 1 columns is padding always: a batch in which none is may take another kernel on an
        accelerator, and then one user's prompt would move the others' numbers.
        """
        encoded = (
            tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] if texts else []
        )
        ids = torch.full((len(texts), width + 1), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            kept = tokens[:width]
            ids[row, width + 1 - len(kept) :] = torch.tensor(kept, dtype=torch.long)
            mask[row, width + 1 - max(1, len(kept)) :] = 1  # a row without any token would have nothing to attend to
        return cls(ids, mask)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Prompts:
        return Prompts(self.ids[rows], self.mask[rows])


@dataclass(frozen=True)
class Stream:
    """Users in the order in which they arrive, K an update. Private, except the number of slots.

    Attributes:
        ids: numbers of the users; no number may occur twice.
        prompts: prompts of the users.
        present: (N,) whether there is a user in the slot; an empty slot adds nothing.
    """

    ids: tuple[int, ...] = field(repr=False)
    prompts: Prompts
    present: torch.Tensor = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.prompts) == len(self.present):
            problem = f"{len(self.ids)} users, {len(self.prompts)} prompts and {len(self.present)} coins do not match"
            raise ConfigError("users", problem, fix="give every slot one of each")


@dataclass(frozen=True)
class Factors:
    """LoRA adapters as one flat vector, which is clipped, noised and released: A and B of each layer in turn."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, int, int], ...]  # rank, inputs, outputs
    scaling: float

    @classmethod
    def of(cls, peft: Any) -> Factors:
        """The layout of a PEFT model's adapters."""
        pairs = lora_pairs(peft)
        config = peft.peft_config["default"]
        return cls(
            tuple(pair.name.removeprefix("base_model.model.") for pair in pairs),
            tuple((config.r, pair.down.in_features, pair.up.out_features) for pair in pairs),
            config.lora_alpha / config.r,
        )

    @property
    def size(self) -> int:
        """d: number of trained parameters."""
        return sum(rank * (inputs + outputs) for rank, inputs, outputs in self.shapes)

    def stacked(self, vectors: torch.Tensor) -> StackedAdapters:
        """(N, size) vectors as adapters that are applied to a row of a batch each; differentiable."""
        down, up, used = {}, {}, 0
        for name, (rank, inputs, outputs) in zip(self.names, self.shapes, strict=True):
            middle, end = used + rank * inputs, used + rank * (inputs + outputs)
            down[name] = vectors[:, used:middle].view(-1, rank, inputs)
            up[name] = vectors[:, middle:end].view(-1, outputs, rank) * self.scaling
            used = end
        return StackedAdapters(down, up)


def flat_adapters(peft: Any) -> torch.Tensor:
    """(size,) float32 copy of a PEFT model's adapters, in the order of ``Factors``."""
    return torch.cat([part.detach().flatten() for pair in lora_pairs(peft) for part in pair.parameters]).float().cpu()


def write_adapters(peft: Any, vector: torch.Tensor) -> None:
    """Write a vector from ``flat_adapters`` into a model's adapters."""
    parts = [part for pair in lora_pairs(peft) for part in pair.parameters]
    with torch.no_grad():
        for part, values in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.view_as(part))


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


class LanguagePolicy:
    """A frozen causal language model with adapters that are given at every call, one for each row of a batch."""

    def __init__(self, base: Any, tokenizer: Any, lora: Lora, seed: int) -> None:
        """Take a base whose every weight is frozen. Raises: ConfigError for adapters with dropout."""
        if lora.dropout:
            raise ConfigError("lora.dropout", f"{lora.dropout} would make a ratio of 1 differ from 1", fix="use 0")
        self.model, self.tokenizer, self.lora, self._seed = base.eval(), tokenizer, lora, seed
        peft = attach_lora(deepcopy(base), lora, seed)
        self.factors, self.start = Factors.of(peft), flat_adapters(peft)

    @property
    def device(self) -> torch.device:
        """The device of the base model."""
        return next(self.model.parameters()).device

    def peft(self, vector: torch.Tensor) -> Any:
        """A PEFT model of its own with these adapters, in evaluation mode."""
        peft = attach_lora(deepcopy(self.model), self.lora, self._seed)
        write_adapters(peft, vector)
        return peft.eval()

    def logits(self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
        """(rows, keep, vocabulary) float32 of the last ``keep`` positions.

        Args:
            vectors: (rows, size), each row's own; (1, size) for all rows; None for the base.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

        def run() -> torch.Tensor:
            found = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
            return found.logits.float()

        if vectors is None:
            return run()
        with self._adapted(vectors, len(ids)):
            return run()

    def log_probabilities(
        self, vectors: torch.Tensor | None, ids: torch.Tensor, mask: torch.Tensor, count: int
    ) -> torch.Tensor:
        """(rows, count) of the last ``count`` tokens, each given all before it; ``vectors`` as for ``logits``."""
        logits = self.logits(vectors, ids, mask, count + 1)[:, :-1]
        return logits.log_softmax(dim=-1).gather(-1, ids[:, -count:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, vector: torch.Tensor, prompts: Prompts, uniforms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(ids, mask, counted) of ``Rollouts``, at temperature 1.

        Row j is a function of its own prompt and of ``uniforms[j]``, (rows, new) on [0, 1). Every row takes all steps,
        whatever it says: work and shapes are public.
        """
        mask, cache = prompts.mask.to(self.device), DynamicCache(config=self.model.config)
        ids, inputs = [prompts.ids.to(self.device)], prompts.ids.to(self.device)
        going = torch.ones(len(mask), dtype=torch.bool, device=self.device)
        counted = []
        with self._adapted(vector[None], len(mask)):
            for step in range(uniforms.shape[1]):
                positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
                logits = self.model(
                    input_ids=inputs, attention_mask=mask, position_ids=positions, past_key_values=cache,
                    use_cache=True, logits_to_keep=1,
                ).logits[:, -1]  # fmt: skip
                inputs = _drawn(logits, uniforms[:, step].to(self.device))[:, None]
                inputs = torch.where(going[:, None], inputs, self.tokenizer.pad_token_id)
                ids.append(inputs)
                counted.append(going)
                mask = torch.cat([mask, going[:, None].long()], dim=1)
                going = going & (inputs[:, 0] != self.tokenizer.eos_token_id)
        return torch.cat(ids, dim=1), mask, torch.stack(counted, dim=1)

    def _adapted(self, vectors: torch.Tensor, rows: int) -> Any:
        own = torch.arange(rows) if len(vectors) == rows else torch.zeros(rows, dtype=torch.long)
        return self.factors.stacked(vectors.to(self.device)).apply(self.model, own.to(self.device))


def _drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """(rows,) tokens by the inverse distribution function, in float64."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, (uniforms.double() * cumulative[:, -1])[:, None].contiguous(), right=True)
    return drawn.squeeze(-1).clamp(max=logits.shape[-1] - 1)


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


def bandit_loss(policy: LanguagePolicy, prompt_weight: float = 0.0) -> Loss:
    """-mean over the continuation's tokens of pi / pi_old * A, and ``prompt_weight`` times the prompt's mean loss.

    Data: ids, mask, counted, log-probabilities under the old policy and advantages of one action a user.
    """

    def loss(vectors: torch.Tensor, rows: tuple[torch.Tensor, ...], weights: torch.Tensor) -> torch.Tensor:
        ids, mask, counted, before, gains = (part[:, 0] for part in rows)
        count = ids.shape[1] - 1 if prompt_weight else counted.shape[1]
        logs = policy.log_probabilities(vectors, ids, mask, count)
        ratios = (logs[:, -counted.shape[1] :] - before).exp()
        total = -(ratios * counted).sum(dim=1) / counted.sum(dim=1) * gains
        if prompt_weight:
            # A token without one before it is no prediction.
            seen = (mask[:, 1:] * mask[:, :-1])[:, : -counted.shape[1]]
            total = total - prompt_weight * (logs[:, : seen.shape[1]] * seen).sum(dim=1) / seen.sum(dim=1).clamp(min=1)
        return total * weights[:, 0].to(total.device)

    return loss


@dataclass
class LanguageState:
    """Released values alone: the adapter, and the noisy mean of every update, by number."""

    adapter: torch.Tensor
    means: dict[int, torch.Tensor] = field(default_factory=dict)


def adapters_met(start: torch.Tensor, means: dict[int, torch.Tensor], server_step: float) -> dict[int, torch.Tensor]:
    """The adapter that the users of each update met, by number."""
    met = {}
    for number in sorted(means):
        met[number] = start
        start = start + server_step * means[number]
    return met


def train(
    learner: LanguageLearner,
    users: Stream,
    public: Prompts,
    held_out: Prompts,
    header: RunHeader,
    directory: Path,
    entropy: Entropy,
    on_point: Callable[[Figures], None] = lambda point: None,
) -> tuple[LanguageState, list[Figures]]:
    """Train an adapter on a stream of users, resuming what ``directory`` holds of the run; a finished one is read.

    Guarantee: every adapter along the way is a function of the releases that the ledger lists, charged before they
    were made, and of public values. (certified, delta)-DP for one user, whose slot is zeroed (null-replacement;
    another user in their place may move it twice as far); users are fixed responses to whatever policies they meet
    (spec, 5.5), and others see no continuation of theirs. Private: ``users`` and what each of them computes. Public:
    everything else, the number of slots and the curve included.

    Args:
        users: updates * K of them; those of update t are the t-th K.
        public: simulated prompts, whose mean reward is the baseline.
        held_out: other simulated prompts, for the curve.
        directory: receives ledger.jsonl, state.safetensors and progress.json.
        on_point: called with every point of the curve.

    Raises: ConfigError, LedgerError, BudgetError; UserReuseError if a user would be in two updates.
    """
    bandit, method = learner.bandit, learner.method
    if len(users.ids) != bandit.users * bandit.updates:
        problem = f"{len(users.ids)} users do not fill {bandit.updates} updates of {bandit.users}"
        raise ConfigError("users", problem, fix="give as many as there are slots")
    if (header.mechanism, header.units) != (NAME, len(users.ids)):
        raise ConfigError("header.units", "is not what the stream holds", fix=f"give {NAME} and the number of slots")
    # All of them, before anything is charged; also those whom a process that died had met.
    Met().admit(users.ids)
    schedule = {**asdict(method), **asdict(bandit), "order": digest_of(users.ids)}
    if is_finished(directory, header, schedule):
        return _load(directory)
    with open_ledger(directory, header, method.planned(bandit.updates), schedule, entropy) as ledger:
        begun = RunFolder(directory).progress.exists()
        state, points = _load(directory) if begun else (LanguageState(learner.policy.start), [])
        points = points or [learner.evaluate(state.adapter, held_out, 0)]
        # Charged updates that were lost with their process are not made again: their users have been met.
        done = ledger.releases
        _save(directory, state, points, done)  # before anything is charged
        for number in progress(range(done, bandit.updates), "updates", total=bandit.updates, initial=done):
            step(learner, state, number, users, public, ledger, entropy)
            if (number + 1) % bandit.evaluate_every == 0 or number + 1 == bandit.updates:
                points.append(learner.evaluate(state.adapter, held_out, number + 1))
                on_point(points[-1])
            _save(directory, state, points, ledger.releases)
        ledger.finish()
    return state, points


def step(
    learner: LanguageLearner,
    state: LanguageState,
    number: int,
    users: Stream,
    public: Prompts,
    ledger: Ledger,
    entropy: Entropy,
) -> None:
    """Make one update from the users of this number."""
    slots = list(range(number * learner.bandit.users, (number + 1) * learner.bandit.users))
    baseline = float(learner.simulated(state.adapter, public, number).rewards.mean())
    rollouts = learner.respond(state.adapter, users.prompts[slots], learner.uniforms(USERS, slots))
    updates = learner.updates(state.adapter, rollouts, baseline, users.present[slots])
    ledger.charge(learner.method.release(number))
    (mean,) = noisy_means([updates], [learner.radius], learner.method.multipliers, entropy)
    state.adapter, state.means[number] = state.adapter + learner.bandit.server_step * mean, mean


def _save(directory: Path, state: LanguageState, points: list[Figures], releases: int) -> None:
    """State first: a process that dies between the two leaves older points, never a newer claim."""
    tensors = {"adapter": state.adapter} | {str(number): mean for number, mean in state.means.items()}
    save_state(RunFolder(directory).state, tensors, releases)
    write_json(RunFolder(directory).progress, [vars(point) for point in points])


def _load(directory: Path) -> tuple[LanguageState, list[Figures]]:
    tensors = load_file(RunFolder(directory).state)
    adapter = tensors.pop("adapter")
    points = [Figures(**values) for values in json.loads(RunFolder(directory).progress.read_text(encoding="utf-8"))]
    return LanguageState(adapter, {int(number): mean for number, mean in tensors.items()}), points
