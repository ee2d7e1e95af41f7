"""Reinforcement learning from a reward in small: a language model as a policy, one prompt and one continuation a user.

rollouts  = respond(released adapter, prompts)          # K users, each once, each with a sample of their own
updates   = what each user computes from their own rollout and released values
mean      = release(updates, radius)                    # charged, clipped, noised: dptune.policy.learner
adapter  += server_step * mean

A contextual bandit: one action a user, the whole continuation, so there is no critic. Only LoRA adapters are trained,
on a frozen public base. The reward is a public function; private are prompts, and what is sampled from them
(spec dp-policy-gradient.md, section 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from dptune.errors import ConfigError
from dptune.policy.language.learner import USERS, Figures, LanguageLearner
from dptune.policy.language.prompts import Prompts, Stream
from dptune.policy.learner import ReleaseMeans, updates_left
from dptune.policy.met import Met
from dptune.policy.method import NAME
from dptune.policy.opening import digest_of, is_finished, open_ledger, read_progress, save_progress
from dptune.privacy.entropy import Entropy
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.progress import progress


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
        done = ledger.releases
        _save(directory, state, points, done)  # before anything is charged
        left = updates_left(ledger, method, bandit.updates, entropy)
        for number, release in progress(left, "updates", total=bandit.updates, initial=done):
            step(learner, state, number, users, public, release)
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
    release: ReleaseMeans,
) -> None:
    """Make one update from the users of this number."""
    slots = list(range(number * learner.bandit.users, (number + 1) * learner.bandit.users))
    baseline = float(learner.simulated(state.adapter, public, number).rewards.mean())
    rollouts = learner.respond(state.adapter, users.prompts[slots], learner.uniforms(USERS, slots))
    updates = learner.updates(state.adapter, rollouts, baseline, users.present[slots])
    (mean,) = release([updates], [learner.radius])
    state.adapter, state.means[number] = state.adapter + learner.bandit.server_step * mean, mean


def _save(directory: Path, state: LanguageState, points: list[Figures], releases: int) -> None:
    tensors = {"adapter": state.adapter} | {str(number): mean for number, mean in state.means.items()}
    save_progress(directory, tensors, points, releases)


def _load(directory: Path) -> tuple[LanguageState, list[Figures]]:
    tensors, points = read_progress(directory, Figures)
    adapter = tensors.pop("adapter")
    return LanguageState(adapter, {int(number): mean for number, mean in tensors.items()}), points
