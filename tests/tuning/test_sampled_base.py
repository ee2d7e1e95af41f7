"""The model under a sampled adapter is the one that it was tuned on, or the texts' card says otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dptune.training.model import ModelSource
from dptune.tuning import sampling


def test_a_base_of_another_revision_is_noted() -> None:
    tuned: Any = SimpleNamespace(base="org/model", revision="a" * 40)
    assert sampling._other_base(tuned, ModelSource("org/model", "a" * 40)) == ()
    (note,) = sampling._other_base(tuned, ModelSource("org/model", "b" * 40))
    assert note == f"the adapter was tuned on org/model at {'a' * 40}, and the model is org/model at {'b' * 40}"
