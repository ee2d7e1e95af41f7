"""The model under a sampled adapter is the one that it was tuned on, or the texts' card says otherwise."""

from __future__ import annotations

from dptune.training.model import ModelSource
from dptune.tuning.loading import other_base


def test_a_base_of_another_revision_is_noted() -> None:
    assert other_base("org/model", "a" * 40, ModelSource("org/model", "a" * 40)) == ()
    (note,) = other_base("org/model", "a" * 40, ModelSource("org/model", "b" * 40))
    assert note == f"the adapter was tuned on org/model at {'a' * 40}, and the model is org/model at {'b' * 40}"
