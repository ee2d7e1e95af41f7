"""States of frozen layers are computed once, and move no bit of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_classifiers import adapted_classifier, labelled
from tiny_models import FAMILIES, close, each_record, make_header, make_plan, records, weights

from dptune.core.settings import Lora
from dptune.mechanisms.registry import build
from dptune.privacy.entropy import FixedSeed
from dptune.training.gradients import frozen_layers as module
from dptune.training.gradients.frozen_layers import FrozenLayers, frozen_layers
from dptune.training.gradients.parameter_groups import trained_blocks
from dptune.training.loop import train
from dptune.training.models.model import attach_lora
from dptune.training.privacy_units import PrivacyUnits
from dptune.training.spec import RunSpec

#: Layers two and three of four.
UPPER = r".*\.(h|layers)\.[23]\..*(c_attn|q_proj|v_proj)"
#: The second of two layers.
CLASSIFIERS = {"bert by the mean of its tokens": r".*layer\.1\..*query", "roberta": r".*layer\.1\..*query"}


def upper(family: str = "llama", targets: str = UPPER, **options: Any) -> Any:
    lora = Lora(rank=4, alpha=8, target_modules=targets, **options)
    return attach_lora(FAMILIES[family](layers=4), lora, init_seed=7).train()


def run(directory: Path, family: str, *, units: PrivacyUnits | None = None, **plan: Any) -> dict[str, torch.Tensor]:
    """The weights after a run whose coins and noise are those of a seed."""
    if family in CLASSIFIERS:
        model, tokens = adapted_classifier(family, target_modules=CLASSIFIERS[family]), labelled(8)
    else:
        model, tokens = upper(family), records()
    entropy = FixedSeed(3)
    units = units or each_record(tokens)
    made = make_plan(len(units), physical_batch_size=4, **{"steps": 8, **plan})
    header = make_header(entropy, units)
    mechanism = build("static", {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "pairs": len(trained_blocks(model))})
    close(train(RunSpec(model, tokens, units, mechanism, made, header), directory, entropy))
    return weights(model)


class Counting:
    """Counts the passes through the frozen layers alone, and the rows whose states were kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes, self.kept = 0, 0
        states_of, kept = FrozenLayers.states_of, FrozenLayers.kept

        def counted(layers: FrozenLayers, *inputs: Any) -> torch.Tensor:
            self.passes += 1
            return states_of(layers, *inputs)

        def read(layers: FrozenLayers, chosen: list[int], *inputs: Any) -> Any:
            self.kept += len(chosen)
            return kept(layers, chosen, *inputs)

        monkeypatch.setattr(FrozenLayers, "states_of", counted)
        monkeypatch.setattr(FrozenLayers, "kept", read)


@pytest.mark.parametrize("family", [*FAMILIES, *CLASSIFIERS])
def test_no_bit_of_a_run_moves(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are drawn anew at each step, so that records meet in other rows than those that they were kept from."""
    counting = Counting(monkeypatch)
    found = run(tmp_path / "kept", family)
    assert counting.kept > 16
    monkeypatch.setattr(module, "_LEAST_VISITS", 1e9)
    expected = run(tmp_path / "computed", family)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(value.any() for name, value in expected.items() if "lora_B" in name)


def test_each_record_passes_once_at_each_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    run(tmp_path, "llama", sample_rate=1.0)
    # Two when the run is opened, to compare; then eight records in batches of four; nothing in the seven later steps.
    assert (counting.passes, counting.kept) == (2 + 2, 8 * 8)


def test_units_with_several_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's width is that of its unit's longest record, so that one record may be kept at two widths."""
    units = PrivacyUnits.of("patient", np.array([0, 0, 1, 1, 2, 3, 3, 3]), 3)
    found = run(tmp_path / "kept", "llama", units=units)
    monkeypatch.setattr(module, "_LEAST_VISITS", 1e9)
    expected = run(tmp_path / "computed", "llama", units=units)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_states_are_kept_by_record_and_width() -> None:
    tokens = records()
    layers = found(upper(), tokens)
    assert layers is not None
    for width in (14, 20):
        layers.fill([3, 5], tokens, 2, width)
    alone = layers.states_of(*tokens.batch(np.array([5]), torch.device("cpu"), height=1, width=20))
    kept = layers._states
    assert sorted(kept) == [(3, 14), (3, 20), (5, 14), (5, 20)]
    length = len(tokens.rows[5])
    torch.testing.assert_close(kept[5, 20][:length], alone[0, :length])


def found(model: Any, tokens: Any, **changes: Any) -> FrozenLayers | None:
    asked = {"rows": 4, "widths": (tokens.width,), "visits": 5.0} | changes
    return frozen_layers(model, trained_blocks(model), tokens, **asked)


@pytest.mark.parametrize(
    "why",
    ["the first layer trains", "each record is read once", "too little memory", "states differ", "unknown layers"],
)
def test_a_model_is_left_alone_where(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = upper(), records()
    assert found(model, tokens) is not None
    changes: dict[str, Any] = {}
    if why == "the first layer trains":
        model = upper(targets=r".*q_proj")
    elif why == "each record is read once":
        changes["visits"] = 1.5
    elif why == "too little memory":
        monkeypatch.setattr(module, "available_memory", lambda: 1000)
    elif why == "states differ":
        spoilt = FrozenLayers.states_of
        monkeypatch.setattr(FrozenLayers, "states_of", lambda *inputs: spoilt(*inputs) * (1 + 1e-6))
    else:
        model.base_model.model.model.layers[0].forward = lambda *inputs, **named: (inputs[0], None)
    assert found(model, tokens, **changes) is None


def test_dropout_of_adapters_is_no_obstacle_and_modes_stay() -> None:
    model, tokens = upper(dropout=0.5), records()
    modes = [part.training for part in model.modules()]
    assert found(model, tokens) is not None
    assert [part.training for part in model.modules()] == modes
