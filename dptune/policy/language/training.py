"""DP policy gradient on a language model: users bring a prompt each, and get a reward for the continuation.

rollouts  = respond(released adapter, prompts)          # K users, each in one update, each with a sample of their own
updates   = what each user computes from their own rollout and released values
mean      = release(updates, radius)                    # charged, clipped, with noise: dptune.policy.learner
adapter  += server_step * mean

The problem is a contextual bandit: each user takes one action, the whole continuation, so there is no critic. LoRA
adapters are trained on a frozen public base. The reward is a public function of the text. Private are the prompts and
the continuations sampled from them (spec dp-policy-gradient.md, section 7).
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
from dptune.policy.met import UserRegister
from dptune.policy.method import NAME
from dptune.policy.opening import digest_of, is_finished, open_ledger, read_progress, save_progress
from dptune.privacy.entropy import Entropy
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader
from dptune.progress import progress


@dataclass
class LanguageState:
    """State of a run: the adapter, (size,), and the noisy mean of every update by its number. Public."""

    adapter: torch.Tensor
    means: dict[int, torch.Tensor] = field(default_factory=dict)


def adapters_by_update(
    start: torch.Tensor, means: dict[int, torch.Tensor], server_step: float
) -> dict[int, torch.Tensor]:
    """Recompute the adapter that the users of each update got, by the update's number, from the released means.

    Args:
        start: (size,) initial adapter.
        means: (size,) noisy mean of each update.
    """
    adapters = {}
    for number in sorted(means):
        adapters[number] = start
        start = start + server_step * means[number]
    return adapters


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
    """Train an adapter on a stream of users, or resume the run in ``directory``; a finished run is only read.

    Guarantee: the run is (certified epsilon, delta)-DP for one user whose slot becomes empty; replacing the user by
    another one may move it twice as far. Every adapter of the run is a function of public values and of the releases in
    its ledger, each of which was charged before it was made. A user is a fixed response to the policies that they get
    (spec dp-policy-gradient.md, section 5.5), and no other user sees their continuation. Private: ``users``, and the
    updates that they compute. Public: all else, the number of slots and the curve included.

    Args:
        users: stream of updates * K users, the first K of whom are in the first update, and so on.
        public: simulated prompts, whose mean reward is the baseline.
        held_out: other simulated prompts, for the curve.
        header: header of the run's ledger.
        directory: receives ledger.jsonl, state.safetensors and progress.json.
        entropy: source of the noise.
        on_point: called with every point of the curve after the first.

    Returns: the released state, and the learning curve.

    Raises: ConfigError, LedgerError, BudgetError; UserReuseError if a user would be in two updates.
    """
    bandit, method = learner.bandit, learner.method
    if len(users.ids) != bandit.users * bandit.updates:
        problem = f"{len(users.ids)} users do not fill {bandit.updates} updates of {bandit.users}"
        raise ConfigError("users", problem, fix="give one user for each slot")
    if (header.mechanism, header.units) != (NAME, len(users.ids)):
        raise ConfigError(
            "header.units",
            "does not describe this stream of users",
            fix=f"give mechanism {NAME} and the number of slots",
        )
    # Check the whole stream before anything is charged, the users of a process that died included.
    UserRegister().admit(users.ids)
    schedule = {**asdict(method), **asdict(bandit), "order": digest_of(users.ids)}
    if is_finished(directory, header, schedule):
        return _load(directory)
    with open_ledger(directory, header, method.planned(bandit.updates), schedule, entropy) as ledger:
        resumes = RunFolder(directory).progress.exists()
        state, points = _load(directory) if resumes else (LanguageState(learner.policy.start), [])
        points = points or [learner.evaluate(state.adapter, held_out, 0)]
        start = ledger.releases
        _save(directory, state, points, start)  # an unwritable disk must fail before anything is charged
        updates = updates_left(ledger, method, bandit.updates, entropy)
        for number, release in progress(updates, "updates", total=bandit.updates, initial=start):
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
    """Run update ``number``: roll out its users, release the mean of their updates, and move the adapter by it."""
    slots = list(range(number * learner.bandit.users, (number + 1) * learner.bandit.users))
    baseline = float(learner.simulate(state.adapter, public, number).rewards.mean())
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
