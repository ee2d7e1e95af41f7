"""Canaries, the secrets that later attacks look for: the DVC stage that plants them, and those among users' prompts.

A rerun keeps secrets that fit the settings and the split: other ones would rename every finished cell, which would then
train, and pay epsilon, again. Remove data/canaries to draw new ones.
"""

from __future__ import annotations

import hmac
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from secrets import token_hex
from time import process_time

from dptune.core.errors import DataError
from dptune.core.files import DamagedFileError, private_directory, read_json, sha256, write_json
from dptune.records.canaries import ALPHABET, POOL, SECRET_LENGTH, CanaryPlan, are_planted, inject
from dptune.records.parquet_file import read_records
from tasks.paths import (
    MANIFEST,
    MAXIMISERS,
    PUBLIC_MODEL,
    PUBLIC_NARRATIVES,
    PUBLIC_SAMPLES,
    SECRETS,
    SPLITS,
    TRAIN,
    planted_secrets,
)
from tasks.settings.params import load_settings
from tasks.stage import run_stage

_BESIDE = 300  # public texts beside which maximisers must be told apart


def plant() -> None:
    """Write the training file, the manifest for everyone, and the secrets for the auditor alone."""
    canaries, split = load_settings().canaries, SPLITS / "train.parquet"
    plan = CanaryPlan(
        canaries.extraction,
        canaries.audit,
        canaries.carrier_seed,
        canaries.repeats,
        canaries.audit_kind,
        _WRITERS[canaries.audit_kind](canaries.carrier_seed) if canaries.says_samples else (),
        canaries.carrier,
    )
    with suppress(DamagedFileError):  # a manifest that is missing, or was cut off: new secrets bring a new one
        if are_planted(split, TRAIN, planted_secrets(), plan):
            logging.getLogger(__name__).info("the planted secrets fit settings and split, and stay as they are")
            return
    drawn = private_directory(SECRETS) / f"drawn_{token_hex(8)}.json"  # several copies of the checkout may draw at once
    inject(split, TRAIN, drawn, MANIFEST, plan)
    drawn.replace(planted_secrets())


def _samples(_: int) -> list[str]:
    """The texts of the public model. Raises: DataError if the stage pretrain did not make them."""
    _check_made(PUBLIC_SAMPLES)
    return list(read_json(PUBLIC_SAMPLES)["texts"])


def _maximisers(seed: int) -> list[str]:
    """Texts of the public model chosen by their gradients; those of the same model and seed are kept.

    Raises: DataError if the stage pretrain made no model.
    """
    import torch  # takes seconds, and is not needed by other kinds

    from dptune.audit.text import maximisers
    from dptune.training.models.model import ModelSource, load_base, load_tokenizer

    weights = PUBLIC_MODEL / "model.safetensors"
    _check_made(weights)
    digests = [sha256(file) for file in (weights, PUBLIC_MODEL / "tokenizer.json", PUBLIC_NARRATIVES)]
    made_of = {"public": digests, "choice": maximisers.CHOICE, "count": POOL, "seed": seed}
    with suppress(DamagedFileError):
        if MAXIMISERS.exists() and (kept := read_json(MAXIMISERS))["made_of"] == made_of:
            return list(kept["texts"])
    source, began = ModelSource(str(PUBLIC_MODEL), None, "float32"), process_time()
    public = read_records(PUBLIC_NARRATIVES).text.to_pylist()[:_BESIDE]
    model = load_base(source, torch.device("cpu"))
    texts = maximisers.maximisers(model, load_tokenizer(source), POOL, public, seed=seed)
    write_json(MAXIMISERS, {"made_of": made_of, "texts": texts})
    said = "chose %d texts, each of %d samples of the public model, in %.0f s of processor time"
    logging.getLogger(__name__).info(said, len(texts), maximisers.CHOICE, process_time() - began)
    return texts


def _check_made(file: Path) -> None:
    if not file.exists():
        fix = "run `python -m tasks.corpus.pretrain --always`, which makes it"
        raise DataError("is missing", fix=fix, file=file)


#: Functions from a public seed to the texts of which canaries say some, by kind.
_WRITERS = {"samples": _samples, "maximisers": _maximisers}


# Canaries among prompts: one user brings each, and a fair coin plants it.


@dataclass(frozen=True)
class PromptCanary:
    """A user whom the auditor adds if a fair coin says so. Private.

    Attributes:
        record: number of the record in the attack split that gives the prompt; it decides the canary's update.
        secret: secret in the prompt.
        included: result of the coin.
    """

    record: int
    secret: str = field(repr=False)
    included: int = field(repr=False)


def secret_of(salt: str, key: int) -> str:
    """The secret of a record: a function of the salt and of the record's own key. Private."""
    return draw_secret(Random(hmac.digest(bytes.fromhex(salt), str(key).encode(), "sha256")))


def draw_secret(entropy: Random) -> str:
    """Draw a secret, all of which are as likely."""
    return "".join(entropy.choice(ALPHABET) for _ in range(SECRET_LENGTH))


if __name__ == "__main__":
    run_stage(plant)
