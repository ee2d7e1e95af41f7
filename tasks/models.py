"""DVC stage: the fingerprints of the experiment's base models, by which a changed model makes its cells run again.

python -m tasks.models

A GGUF file is converted here, once. Nothing of a model is copied into the checkout. DVC sees a change of params.yaml;
after a package or a folder was replaced by another with the same name, run ``dvc repro --force models``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.files import write_json
from dptune.training.models.model_names import name_of
from dptune.training.models.weight_files import digest_of_weights
from tasks.paths import MODELS, PUBLIC_MODEL
from tasks.settings.experiment import Model
from tasks.settings.params import load_settings
from tasks.stage import run_stage


def fingerprint(model: Model) -> dict[str, Any]:
    """Name, revision, SHA-256 and, of a GGUF file, rounding of a model; its own stage for the pipeline's own model.

    Raises: ConfigError for a source that cannot be had.
    """
    if Path(model.source).resolve() == PUBLIC_MODEL.resolve():
        return {"made_by": "pretrain"}
    found = model.weights
    digest = digest_of_weights(found.source, found.revision)
    about = {"source": name_of(found.source), "revision": found.revision, "sha256": digest}
    return about | ({"rounding": found.rounding} if found.kind else {})


def write_fingerprints() -> None:
    """Write the fingerprint of each model of params.yaml. Raises: ConfigError naming the model."""
    found = {}
    for name, model in load_settings().experiment.models.items():
        try:
            found[name] = fingerprint(model)
        except ConfigError as error:
            field = error.field.removeprefix("model.")
            raise ConfigError(f"experiment.models.{name}.{field}", error.problem, fix=error.fix) from None
    write_json(MODELS, found)


if __name__ == "__main__":
    run_stage(write_fingerprints)
