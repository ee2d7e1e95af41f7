"""DVC stage: plant the secrets that later attacks look for.

A rerun keeps secrets that fit the settings and the split: other ones would rename every finished cell, which would then
train, and pay epsilon, again. Remove data/canaries to draw new ones.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from secrets import token_hex

from dptune.core.errors import DataError
from dptune.core.files import DamagedFileError, private_directory, read_json
from dptune.records.canaries import CanaryPlan, are_planted, inject
from tasks.paths import MANIFEST, PUBLIC_SAMPLES, SECRETS, SPLITS, TRAIN, planted_secrets
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def plant() -> None:
    """Write the training file, the manifest for everyone, and the secrets for the auditor alone."""
    canaries, split = load_settings().canaries, SPLITS / "train.parquet"
    plan = CanaryPlan(
        canaries.extraction,
        canaries.audit,
        canaries.carrier_seed,
        canaries.repeats,
        canaries.audit_kind,
        _samples() if canaries.says_samples else (),
        canaries.carrier,
    )
    with suppress(DamagedFileError):  # a manifest that is missing, or was cut off: new secrets bring a new one
        if are_planted(split, TRAIN, planted_secrets(), plan):
            logging.getLogger(__name__).info("the planted secrets fit settings and split, and stay as they are")
            return
    drawn = private_directory(SECRETS) / f"drawn_{token_hex(8)}.json"  # several copies of the checkout may draw at once
    inject(split, TRAIN, drawn, MANIFEST, plan)
    drawn.replace(planted_secrets())


def _samples() -> list[str]:
    """The texts of the public model. Raises: DataError if the stage pretrain did not make them."""
    if not PUBLIC_SAMPLES.exists():
        fix = "run `python -m tasks.corpus.pretrain --always`, which makes it"
        raise DataError("is missing", fix=fix, file=PUBLIC_SAMPLES)
    return list(read_json(PUBLIC_SAMPLES)["texts"])


if __name__ == "__main__":
    run_stage(plant)
