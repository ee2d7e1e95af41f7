"""DVC stage: plant the secrets that later attacks look for."""

from __future__ import annotations

from secrets import token_hex

from dptune.core.errors import DataError
from dptune.core.files import private_directory, read_json
from dptune.records.canaries import inject
from tasks.paths import MANIFEST, PUBLIC_SAMPLES, SECRETS, SPLITS, TRAIN, planted_secrets
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
        samples=_samples() if canaries.says_samples else (),
    )
    drawn.replace(planted_secrets())


def _samples() -> list[str]:
    """The texts of the public model. Raises: DataError if the stage pretrain did not make them."""
    if not PUBLIC_SAMPLES.exists():
        fix = "run `python -m tasks.corpus.pretrain --always`, which makes it"
        raise DataError("is missing", fix=fix, file=PUBLIC_SAMPLES)
    return list(read_json(PUBLIC_SAMPLES)["texts"])


if __name__ == "__main__":
    run_stage(plant)
