"""DP policy gradient on a language model: users bring a prompt each, and get a reward for the continuation.

rollouts  = respond(released adapter, prompts)          # K users, each in one update, each with a sample of their own
updates   = what each user computes from their own rollout and released values
mean      = release(updates, radius)                    # charged, clipped, with noise: dptune.policy.user_updates
adapter  += server_step * mean

The problem is a contextual bandit: each user takes one action, the whole continuation, so there is no critic. LoRA
adapters are trained on a frozen public base. The reward is a public function of the text. Private are the prompts and
the continuations sampled from them (the task of section 6 of Rio, Barlier and Colin 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from dptune.core.errors import ConfigError, first_line
from dptune.core.progress import progress
from dptune.policy.language.learner import USERS, Figures, LanguageLearner
from dptune.policy.language.prompts import Prompts, Stream
from dptune.policy.method import NAME
from dptune.policy.run_files import is_finished, open_ledger, read_progress, save_progress
from dptune.policy.user_updates import ReleaseMeans, updates_left
from dptune.privacy.entropy import Entropy
from dptune.privacy.ledger import Booked
from dptune.privacy.ledger_file import first_header
from dptune.privacy.run_folder import RunFolder
from dptune.privacy.run_header import RunHeader


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
    booked: Booked = nullcontext,
) -> tuple[LanguageState, list[Figures]]:
    """Train an adapter on a stream of users, or resume the run in ``directory``; a finished run is only read.

    Guarantee: the run is (certified epsilon, delta)-DP for one user who leaves or joins, if the user's own key decides
    the update (``Stream.updates``); replacing the user by another one may move it twice as far. Every adapter of the
    run is a function of public values and of the releases in its ledger, each of which was charged before it was made.
    A user is a fixed response to the policies that they get (Vietri et al. 2020), and no other user sees their
    continuation. Private: ``users``, how many come to an update, and what they compute. Public: all
    else, the divisor K and the curve included.

    Args:
        users: users with the number of each one's update; those of no update of the run have no part in it.
        public: simulated prompts, whose mean reward is the baseline.
        held_out: other simulated prompts, for the curve.
        header: header of the run's ledger.
        directory: receives ledger.jsonl, state.safetensors and progress.json.
        entropy: source of the noise.
        on_point: called with every point of the curve after the first.
        booked: makes the context in which a new ledger gets its first line, after all that may refuse the run.

    Returns: the released state, and the learning curve.

    Raises: ConfigError, LedgerError, BudgetError.
    """
    bandit, method = learner.bandit, learner.method
    if header.mechanism != NAME:
        raise ConfigError("header.mechanism", f"is {header.mechanism!r}", fix=f"give {NAME}")
    begun = first_header(RunFolder(directory).ledger)
    if begun is not None and begun.run_id != header.run_id:  # users are dealt by it: some would be in two updates
        problem = f"is {header.run_id!r}, and the run in {directory} began as {begun.run_id!r}"
        raise ConfigError("header.run_id", problem, fix="resume it under its own id, or take another folder")
    # The schedule holds no user's key: anybody could test a guess of the users against its digest. A user's update
    # follows from the user's own key and the run's id, so that a resumed run puts nobody into a second update.
    schedule = {**asdict(method), **asdict(bandit)}
    if is_finished(directory, header, schedule):
        return _load(directory)
    rehearse(learner, public)
    with open_ledger(directory, header, method.planned(bandit.updates), schedule, entropy, booked) as ledger:
        resumes = RunFolder(directory).progress.exists()
        state, points = _load(directory) if resumes else (LanguageState(learner.policy.start), [])
        points = points or [learner.evaluate(state.adapter, held_out, 0)]
        start = ledger.releases
        _save(directory, state, points, start)  # an unwritable disk must fail before anything is charged
        updates = updates_left(ledger, method, bandit.updates, bandit.users, entropy)
        for number, release in progress(updates, "updates", total=bandit.updates, initial=start):
            step(learner, state, number, users, public, release)
            if (number + 1) % bandit.evaluate_every == 0 or number + 1 == bandit.updates:
                points.append(learner.evaluate(state.adapter, held_out, number + 1))
                on_point(points[-1])
            _save(directory, state, points, ledger.releases)
        ledger.finish()
    return state, points


def rehearse(learner: LanguageLearner, public: Prompts) -> None:
    """Compute the update of one simulated user. Reads no private prompt.

    Raises: ConfigError for a model that cannot: a run would be booked, and charged, before it failed.
    """
    start = learner.policy.start
    try:
        found = learner.updates(start, learner.simulate(start, public[:1], 0), 0.0)
    except Exception as error:  # each model has its own way to fail
        problem = f"no update of a simulated user can be computed ({type(error).__name__}: {first_line(error)})"
        raise ConfigError("model", problem, fix="check its files, or train another model") from error
    if not bool(torch.isfinite(found).all()):
        problem = "computes an update of a simulated user that is not finite"
        raise ConfigError("model", problem, fix="check its weights and config.json")


def step(
    learner: LanguageLearner,
    state: LanguageState,
    number: int,
    users: Stream,
    public: Prompts,
    release: ReleaseMeans,
) -> None:
    """Run update ``number``: roll out its users, release the mean of their updates, and move the adapter by it."""
    baseline = float(learner.simulate(state.adapter, public, number).rewards.mean())
    rows, count = users.of_update(number), learner.bandit.users
    blocks = [learner.policy.start.new_zeros(0, learner.policy.factors.size, dtype=torch.float64)]
    # K rows at a time, filled up with a simulated prompt: if their number changed a shape, and with it a kernel, one
    # user would change the others' numbers.
    for first in range(0, len(rows), count):
        some = rows[first : first + count]
        blank = [0] * (count - len(some))
        prompts = users.prompts[some] + public[blank]
        numbers = [*users.keys[some].tolist(), *blank]
        present = torch.cat([users.present[some], torch.zeros(len(blank), dtype=torch.bool)])
        rollouts = learner.respond(state.adapter, prompts, learner.uniforms(USERS, numbers))
        blocks.append(learner.updates(state.adapter, rollouts, baseline, present)[: len(some)])
    updates = torch.cat(blocks)
    (mean,) = release([updates], [learner.radius])
    state.adapter, state.means[number] = state.adapter + learner.bandit.server_step * mean, mean


def _save(directory: Path, state: LanguageState, points: list[Figures], releases: int) -> None:
    tensors = {"adapter": state.adapter} | {str(number): mean for number, mean in state.means.items()}
    save_progress(directory, tensors, points, releases)


def _load(directory: Path) -> tuple[LanguageState, list[Figures]]:
    tensors, points = read_progress(directory, Figures)
    adapter = tensors.pop("adapter")
    return LanguageState(adapter, {int(number): mean for number, mean in tensors.items()}), points
