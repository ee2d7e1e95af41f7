"""The model under a sampled adapter is the one that it was tuned on, or the texts' card says otherwise."""

from __future__ import annotations

import json
from pathlib import Path

from dptune.training.model import ModelSource
from dptune.tuning.loading import other_base


def test_a_base_of_another_revision_is_noted(tmp_path: Path) -> None:
    tuned = {"base_model_name_or_path": "org/model", "revision": "a" * 40}
    (tmp_path / "adapter_config.json").write_text(json.dumps(tuned))
    assert other_base(tmp_path, ModelSource("org/model", "a" * 40)) == ()
    (note,) = other_base(tmp_path, ModelSource("org/model", "b" * 40))
    assert note == f"the adapter was tuned on org/model at {'a' * 40}, and the model is org/model at {'b' * 40}"
