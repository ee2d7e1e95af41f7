"""The audit of prompts finds what can be found, and its bound errs as rarely as it says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_models import gpt2, tokenizer

from dptune.audit.one_run import one_run
from dptune.audit.text.membership import auc
from dptune.audit.text.prompts import attack_figures, insert_secret, log_ratios, opening, secret_scores, update_scores
from dptune.audit.verdict import Certificate
from dptune.core.errors import ConfigError
from dptune.core.settings import Lora
from dptune.policy.language.learner import LanguageLearner, LanguagePolicy
from dptune.policy.language.prompts import Lexicon, Prompts, Stream
from dptune.policy.language.training import train
from dptune.policy.method import Dppg
from dptune.policy.schedules import Bandit
from dptune.privacy.entropy import OsEntropy
from dptune.privacy.run_header import RunHeader
from dptune.records.canaries import ALPHABET

TEXT = "The patient is well. The patient takes insulin twice a day."
USERS, UPDATES, WIDTH = 16, 3, 32
LETTERS = Lexicon(frozenset("aeiou"), frozenset("bcdfg"))


def secrets(count: int, seed: int = 0) -> list[str]:
    rows = np.random.default_rng(seed).choice(list(ALPHABET), (count, 10))
    return ["".join(row) for row in rows]


@cache
def policy() -> LanguagePolicy:
    return LanguagePolicy(gpt2().requires_grad_(False), tokenizer(), Lora(rank=4, alpha=8, dropout=0.0), seed=3)


def trained(
    directory: Path, told: list[str], present: np.ndarray, **changes: Any
) -> tuple[LanguageLearner, Any, Prompts, Any]:
    """A run without noise in which every user is a candidate."""
    small = {"users": USERS, "updates": UPDATES, "prompt_tokens": WIDTH, "new_tokens": 6, "radius": 0.2}
    learner = LanguageLearner(policy(), LETTERS, Dppg(noise_multiplier=0.0, critic="none"), Bandit(**(small | changes)))
    header = RunHeader("dppg", "dppg", "certified", None, 1e-5, "prompt", len(told))
    prompts, public = (Prompts.of(some, tokenizer(), WIDTH) for some in (told, simulated()))
    users = Stream(np.arange(len(told)), prompts, updates_of(told), torch.from_numpy(present))
    state, _ = train(learner, users, public, public[:2], header, directory, OsEntropy())
    return learner, state, prompts, public


def updates_of(told: list[str]) -> np.ndarray:
    return np.arange(len(told)) // USERS


def simulated() -> list[str]:
    return [insert_secret(TEXT, secret) for secret in secrets(12, seed=99)]


def test_a_secret_lies_after_the_first_sentence() -> None:
    assert insert_secret(TEXT, "K7") == "The patient is well. secret_id=K7. The patient takes insulin twice a day."
    assert insert_secret("No more.", "K7") == "No more. secret_id=K7."
    assert insert_secret(TEXT, "K7").startswith(opening(TEXT) + " secret_id=")
    assert opening("No end") == "No end."


def test_log_ratios_are_those_of_the_normal_law_in_full() -> None:
    generator = torch.Generator().manual_seed(0)
    own, simulated = (torch.randn(rows, 12, generator=generator, dtype=torch.float64) for rows in (3, 6))
    released, others, noise = torch.randn(12, generator=generator, dtype=torch.float64), 5, 0.7
    found = log_ratios(own, released, simulated, others, noise)
    covariance = others * torch.cov(simulated.T)
    covariance = 0.5 * covariance + (noise**2 + 0.5 * covariance.trace() / 12) * torch.eye(12, dtype=torch.float64)
    for row in range(3):
        rest = [other for other in range(3) if other != row]
        whole = covariance + sum(torch.outer(own[other], own[other]) for other in rest) / 4
        middle = others * simulated.mean(dim=0) + own[rest].sum(dim=0) / 2
        law = torch.distributions.MultivariateNormal(middle, whole)
        shifted = torch.distributions.MultivariateNormal(middle + own[row], whole)
        assert float(shifted.log_prob(released) - law.log_prob(released)) == pytest.approx(found[row], rel=1e-6)


def test_the_bound_exceeds_the_truth_as_rarely_as_it_says() -> None:
    """The Gaussian mechanism itself, in 60 audits at a confidence of 0.8 each: a sound bound is above its epsilon in
    12 of them on average, and in more than 24 with chance 2e-4 at most; the attack is no better than the law allows."""
    generator, noise, delta, epsilon = torch.Generator().manual_seed(5), 1.0, 1e-5, 4.3772
    above, areas = 0, []
    for _ in range(60):
        own = torch.nn.functional.normalize(torch.randn(48, 200, generator=generator), dim=1)
        coins = torch.rand(48, generator=generator) < 0.5
        released = (own * coins[:, None]).sum(dim=0) + noise * torch.randn(200, generator=generator)
        scores = log_ratios(own, released, torch.zeros(2, 200), 0, noise)
        above += one_run(scores, coins.numpy(), delta, 0.8).epsilon_audited > epsilon
        areas.append(auc(scores[coins.numpy()], scores[~coins.numpy()]))
    assert above <= 24
    # mu = 1 allows Phi(1 / sqrt 2) = 0.760; 60 areas of deviation 0.07 have a mean within 0.03 of theirs (3 sigma).
    assert 0.65 < np.mean(areas) < 0.79


def test_recomputed_updates_give_users_away_where_there_is_no_noise(tmp_path: Path) -> None:
    present = np.random.default_rng(1).random(USERS * UPDATES) < 0.5
    told = [insert_secret(TEXT, secret) for secret in secrets(USERS * UPDATES)]
    learner, state, prompts, public = trained(tmp_path, told, present)
    scores = update_scores(learner, state, prompts, np.arange(len(told)), updates_of(told), public)
    found = attack_figures(scores, present, Certificate(0.5, 0.1), 1e-5, 0.95, 0.999)
    assert found["auc"] > 0.95
    assert found["epsilon_audited"] > 0
    assert str(found["accusation"]).startswith(f"guesses {found['alarm_correct']} of ")


def test_the_final_model_gives_repeated_secrets_away_if_prompts_are_learned(tmp_path: Path) -> None:
    """The power check of the attack on the final model: 16 candidates, of which a coin planted half, each in many
    prompts; a loss on prompts, and a radius that bounds nothing. (No audit of the ledger: a secret has many users.)"""
    candidates = secrets(16)
    coins = np.arange(16) % 2 == 0
    inside = [secret for secret, there in zip(candidates, coins, strict=True) if there]
    told = [insert_secret(TEXT, secret) for secret in inside * (USERS * 12 // len(inside))]
    options = {"prompt_weight": 1.0, "radius": 50.0, "epochs": 4, "learning_rate": 0.02, "updates": 12}
    learner, state, _, _ = trained(tmp_path, told, np.ones(len(told), dtype=bool), **options)
    tuned = learner.policy.peft(state.adapter)
    scores = secret_scores(tuned, learner.policy.model, tokenizer(), [TEXT] * 16, candidates, max_length=WIDTH, rows=16)
    assert auc(scores[coins], scores[~coins]) > 0.9


def test_a_secret_that_was_cut_off_is_an_error() -> None:
    model = policy().model
    with pytest.raises(ConfigError, match="cuts 2 of 2 secrets"):
        secret_scores(model, model, tokenizer(), [TEXT] * 2, secrets(2), max_length=6, rows=2)
