"""The policy, the reward and the public prompts of a cell of ``tasks.policy.rlhf``, by its settings. Public."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from dptune.core.declarations import part_of
from dptune.core.errors import ConfigError
from dptune.policy.method import Dppg
from dptune.records.canaries import ALPHABET, SECRET_LENGTH
from dptune.records.catalogue import find_source
from dptune.records.own_files import write_acquired
from dptune.records.parquet_file import read_records
from dptune.records.reading.record import Record, fingerprint
from tasks.models import fingerprint as fingerprint_of_model
from tasks.paths import PUBLIC_MODEL, PUBLIC_NARRATIVES, PUBLIC_VALIDATION
from tasks.settings.learned_reward import LearnedRewardSettings
from tasks.settings.policy import Rlhf
from tasks.split_records import split_records

if TYPE_CHECKING:
    from dptune.policy.language.learner import LanguageLearner
    from dptune.policy.language.prompts import Prompts
    from dptune.policy.language.reward import Reward

_MOST_TOKENS = 256  # of a text that a learned reward reads


def public_file(settings: Rlhf) -> Path:
    """The file of the prompts of simulated users, of which the policy's base model has read none."""
    return PUBLIC_NARRATIVES if settings.model is None else PUBLIC_VALIDATION


def own_digests(settings: Rlhf) -> list[str]:
    """Digests of a base model, an encoder and labelled texts of the user's own; none by default."""
    models = [model for model in (settings.model, settings.reward and settings.reward.encoder) if model]
    texts = [fingerprint(labelled_texts(settings.reward))] if settings.reward else []
    return [json.dumps(fingerprint_of_model(model), sort_keys=True) for model in models] + texts


def labelled_texts(reward: LearnedRewardSettings) -> tuple[Record, ...]:
    """The public texts with labels that a reward is learned from. Raises: ConfigError, DataError."""
    with TemporaryDirectory(prefix="dptune-") as work:
        found = Path(work) / "labelled.parquet"
        find_source(reward.source).acquire(Path(work), reward.texts)
        write_acquired(Path(work), found)
        return split_records(found)


def make_learner(settings: Rlhf, method: Dppg, users: int, seed: int, device: str) -> LanguageLearner:
    """Load the policy and make its reward.

    Raises: ConfigError for models that cannot be had, and for labelled texts from which nothing can be learned.
    """
    from dptune.policy.language.learner import LanguageLearner, LanguagePolicy
    from dptune.policy.language.prompts import CLINICAL
    from dptune.policy.language.reward import learned_reward
    from dptune.policy.schedules import Bandit
    from dptune.training.models.model import ModelSource, check_device, load_base, load_tokenizer

    base = ModelSource(str(PUBLIC_MODEL)) if settings.model is None else settings.model.weights
    policy = LanguagePolicy(load_base(base, check_device(device)), load_tokenizer(base), settings.lora, seed)
    reward: Reward = CLINICAL
    if (learned := settings.reward) is not None:
        width = min(_MOST_TOKENS, 2 * (settings.prompt_tokens + settings.new_tokens))  # the tokenizers differ
        reward = learned_reward(
            learned.encoder.weights, labelled_texts(learned), learned.positive, width, check_device(device)
        )
    return LanguageLearner(policy, reward, method, part_of(Bandit, settings, users=users, seed=seed))


def public_prompts(settings: Rlhf, seed: int, learner: LanguageLearner) -> tuple[Prompts, Prompts]:
    """Make prompts of simulated users, for the baseline and for the curve.

    Raises: ConfigError for more prompts than public records.
    """
    from dptune.audit.text.prompts import insert_secret

    texts = read_records(public_file(settings)).texts("policy.rlhf")
    count = settings.baseline_prompts + settings.held_out_prompts
    if count > len(texts):
        problem = f"baseline_prompts and held_out_prompts ask for {count} of {len(texts)} public records"
        raise ConfigError("held_out_prompts", problem, fix="use fewer, or raise pretrain.validation_encounters")
    texts = texts[:count]
    if settings.codes:
        codes = np.random.default_rng([seed, 1]).choice(list(ALPHABET), (count, SECRET_LENGTH))
        texts = [insert_secret(text, "".join(code)) for text, code in zip(texts, codes, strict=True)]
    prompts = encoded(texts, learner)
    return prompts[: settings.baseline_prompts], prompts[settings.baseline_prompts :]


def encoded(texts: list[str], learner: LanguageLearner) -> Prompts:
    """The texts as prompts of the run's width."""
    from dptune.policy.language.prompts import Prompts

    return Prompts.of(texts, learner.policy.tokenizer, learner.bandit.prompt_tokens)
