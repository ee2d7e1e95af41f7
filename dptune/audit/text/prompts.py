"""Attacks on the prompts of a policy's users: secrets in prompts, planted by fair coins.

A canary is one more user, whose prompt holds a secret. Its coin decides whether it takes part, for the ledger's
guarantee is about a user who is there or not. One attacker scores each secret by its likelihood under the final
model. The other reads every released adapter, knows the candidates, and recomputes the update that each of them
would have added. A bound above the certified epsilon refutes it; an attack that stays at chance proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dptune.audit.one_run import one_run
from dptune.audit.refutation import refutation
from dptune.audit.text.likelihood import Passage, ending_losses
from dptune.audit.text.membership import auc
from dptune.audit.verdict import Certificate
from dptune.core.errors import ConfigError
from dptune.core.progress import progress
from dptune.policy.language.learner import USERS, LanguageLearner
from dptune.policy.language.prompts import Prompts
from dptune.policy.language.training import LanguageState, adapters_by_update
from dptune.records.canaries import suffix

#: Share by which the covariance of a few simulated updates is shrunk towards a multiple of the identity.
_SHRINKAGE = 0.5
_TINY = 1e-12


def opening(text: str) -> str:
    """The first sentence of a text, or the whole text if it has only one."""
    return text.partition(". ")[0].removesuffix(".") + "."


def insert_secret(text: str, secret: str) -> str:
    """Insert a secret after the first sentence, so that the beginning that becomes a prompt holds it."""
    rest = text.partition(". ")[2]
    return opening(text) + suffix(secret) + (f" {rest}" if rest else "")


def check_whole(tokenizer: Any, texts: Sequence[str], secrets: Sequence[str], width: int) -> None:
    """Raise ConfigError if a prompt of ``width`` tokens cuts off its secret: such a canary could show nothing."""
    openings = [opening(text) + suffix(secret) for text, secret in zip(texts, secrets, strict=True)]
    lengths = [len(ids) for ids in tokenizer(openings, add_special_tokens=False)["input_ids"]] if openings else []
    if (cut := sum(length > width for length in lengths)) > 0:
        problem = f"{width} cuts {cut} of {len(openings)} secrets off their prompts"
        raise ConfigError("prompt_tokens", problem, fix="raise it")


def secret_scores(
    tuned: Any, base: Any, tokenizer: Any, texts: Sequence[str], secrets: Sequence[str], *, max_length: int, rows: int
) -> NDArray[np.float64]:
    """(canaries,) log-likelihood ratios of each secret after its prompt's opening, tuned model against base.

    Args:
        texts: text of each canary, without its secret. Private, as are ``secrets``.
        max_length: number of tokens of a prompt.

    Raises: ConfigError as ``check_whole``.
    """
    check_whole(tokenizer, texts, secrets, max_length)
    passages = [Passage(opening(text), suffix(secret)) for text, secret in zip(texts, secrets, strict=True)]
    after, before = (
        ending_losses(model, tokenizer, passages, max_length=max_length + 1, rows=rows).total for model in (tuned, base)
    )
    return np.asarray(before - after)


def update_scores(
    learner: LanguageLearner,
    state: LanguageState,
    prompts: Prompts,
    keys: NDArray[np.int64],
    updates: NDArray[np.int64],
    public: Prompts,
) -> NDArray[np.float64]:
    """(canaries,) log-likelihood ratios of each canary's being there rather than not, given all releases.

    The attacker recomputes each candidate's update, which is a function of its prompt, the public randomness of its key
    and the released adapter, and looks for it in the noisy mean, whitened by the spread of simulated users' updates.

    Args:
        prompts: (canaries,) prompts with their secrets, whether they took part or not. Private.
        keys: (canaries,) own key of each.
        updates: (canaries,) number of the update that each is in, or would be; public.
        public: the run's simulated prompts.
    """
    bandit, scores = learner.bandit, np.zeros(len(keys))
    noise = learner.method.noise_multiplier * learner.radius
    adapters = adapters_by_update(learner.policy.start, state.means, bandit.server_step)
    for number, adapter in progress(adapters.items(), "attacking updates", total=len(adapters)):
        rows = np.flatnonzero(updates == number).tolist()
        if not rows:
            continue
        simulated = learner.simulate(adapter, public, number)
        baseline = float(simulated.rewards.mean())
        rollouts = learner.respond(adapter, prompts[rows], learner.uniforms(USERS, keys[rows].tolist()))
        scores[rows] = log_ratios(
            learner.updates(adapter, rollouts, baseline),
            state.means[number] * bandit.users,
            learner.updates(adapter, simulated, baseline),
            bandit.users,
            noise,
        )
    return scores


def log_ratios(
    own: torch.Tensor, released: torch.Tensor, simulated: torch.Tensor, others: int, noise: float
) -> NDArray[np.float64]:
    """(candidates,) log-likelihood ratios of "in" against "out", if the sum of all other updates is normal.

    Args:
        own: (candidates, parameters) update that each would add.
        released: (parameters,) the noisy sum.
        simulated: (simulated users, parameters) updates that estimate mean and covariance of the others'.
        others: number of users of that update who are not candidates, or the expected one.
        noise: standard deviation of the noise on the sum.
    """
    own, released, simulated = own.double(), released.double(), simulated.double()
    centred = simulated - simulated.mean(dim=0)
    variance = others * float(centred.square().sum()) / max(1, len(simulated) - 1)
    ridge = max(noise**2 + _SHRINKAGE * variance / own.shape[1], _TINY)
    spread = centred * ((1 - _SHRINKAGE) * others / max(1, len(simulated) - 1)) ** 0.5
    directions = torch.cat([spread, own / 2])
    inner = ridge * torch.eye(len(directions), dtype=torch.float64) + directions @ directions.mT

    def whitened(rows: torch.Tensor) -> torch.Tensor:
        """Rows times (ridge + directions^T directions)^-1, by Woodbury's identity."""
        return (rows - torch.linalg.solve(inner, directions @ rows.mT).mT @ directions) / ridge

    filters = whitened(own)
    rest = released - others * simulated.mean(dim=0) - own.sum(dim=0) / 2
    explained = (filters * own).sum(dim=1) / 4  # a candidate's own coin adds no variance to its own test
    return np.asarray((filters @ rest / (1 - explained).clamp(min=_TINY)).numpy())


def attack_figures(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    known: Certificate,
    delta: float,
    confidence: float,
    alarm: float,
) -> dict[str, Any]:
    """Compute the figures of an attack: those of ``one_run``, its AUC, and those of ``refutation`` at ``alarm``.

    Guarantee: with probability ``confidence`` over the coins, the epsilon of all releases at ``delta``, for one user
    who leaves, is at least ``epsilon_audited``; a run that keeps the certificate is accused with probability ``1 -
    alarm`` at most. Chance is an AUC of 0.5 give or take ``auc_chance_deviation``; an ``epsilon_audited`` of 0 proves
    nothing.
    """
    found = one_run(scores, included, delta, confidence)
    inside, outside = int(included.sum()), int((~included).sum())
    return {
        **found.to_dict(),
        "auc": auc(scores[included], scores[~included]),
        "auc_chance_deviation": ((inside + outside + 1) / (12 * inside * outside)) ** 0.5,
        **refutation(scores, included, known, delta, alarm).to_dict(),
    }
