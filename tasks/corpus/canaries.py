"""DVC stage: plant the secrets that later attacks look for."""

from __future__ import annotations

from dptune.corpus.canaries import inject
from dptune.files import private_directory
from tasks.paths import MANIFEST, SECRETS, SPLITS, TRAIN
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def plant() -> None:
    """Write the training file, the manifest for everyone, and the secrets for the auditor alone."""
    canaries = load_settings().canaries
    private_directory(SECRETS.parent)
    inject(
        SPLITS / "train.parquet",
        TRAIN,
        SECRETS,
        MANIFEST,
        extraction=canaries.extraction,
        audit=canaries.audit,
        repeats=canaries.repeats,
        carrier_seed=canaries.carrier_seed,
    )


if __name__ == "__main__":
    run_stage(plant)
