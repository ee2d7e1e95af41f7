"""DVC stage: plant the secrets that later attacks look for."""

from __future__ import annotations

from secrets import token_hex

from dptune.core.files import private_directory
from dptune.records.canaries import inject
from tasks.paths import MANIFEST, SECRETS, SPLITS, TRAIN, planted_secrets
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def plant() -> None:
    """Write the training file, the manifest for everyone, and the secrets for the auditor alone."""
    canaries = load_settings().canaries
    drawn = private_directory(SECRETS) / f"drawn_{token_hex(8)}.json"  # several copies of the checkout may draw at once
    inject(
        SPLITS / "train.parquet",
        TRAIN,
        drawn,
        MANIFEST,
        extraction=canaries.extraction,
        audit=canaries.audit,
        repeats=canaries.repeats,
        carrier_seed=canaries.carrier_seed,
        audit_kind=canaries.audit_kind,
    )
    drawn.replace(planted_secrets())


if __name__ == "__main__":
    run_stage(plant)
