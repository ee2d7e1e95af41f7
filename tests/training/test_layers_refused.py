"""Layers and units that own weights are not trained by: refused by name, or counted as zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CPU, gpt2, records
from torch import nn

from dptune.core.errors import ConfigError
from dptune.mechanisms.clippers.clipping import Flat
from dptune.mechanisms.clippers.groupwise_clipping import PerPair
from dptune.training.gradients import layer_gradients as engine
from dptune.training.gradients import layer_kinds
from dptune.training.gradients.gradient_check import rehearse
from dptune.training.gradients.layer_gradients import layer_gradients
from dptune.training.gradients.parameter_groups import layer_groups


class TokensFirst(nn.Module):
    """A layer within, which sees (tokens, rows, width)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(states.transpose(0, 1)).transpose(0, 1)
        return found


def test_a_layer_that_sees_tokens_first_is_refused_by_name() -> None:
    """Its rows are tokens of all records: norms by row would bound no record."""
    model = gpt2()
    model.transformer.ln_f = TokensFirst(model.transformer.ln_f)
    with pytest.raises(ConfigError, match=r"^train: layer transformer\.ln_f\.layer saw a tensor of shape \(7, 3, 32\)"):
        rehearse(model, layer_groups(model.requires_grad_(True)))


def test_a_tied_weight_of_which_one_layer_did_not_run_is_refused_by_name() -> None:
    """Model code that reads that layer's weight itself would add a gradient that no norm has."""
    model = gpt2().requires_grad_(True)
    tied, *others = layer_groups(model)
    unused = nn.Linear(1, 1)
    groups = [replace(tied, modules=(*tied.modules, unused)), *others]
    with pytest.raises(ConfigError, match=r"^train: layer transformer\.wte\+lm_head took no part in the forward pass"):
        layer_gradients(model, groups, *records(3).batch(np.arange(3), CPU), None, 3)


class Beside(nn.Module):
    """A layer, and beside it another that reads the same, and whose output is dropped."""

    def __init__(self, layer: nn.Module, beside: nn.Module) -> None:
        super().__init__()
        self.layer, self.beside = layer, beside

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.beside(states)
        found: torch.Tensor = self.layer(states)
        return found


@pytest.mark.parametrize("twice", [False, True], ids=["another", "itself"])
def test_a_layer_of_which_a_run_has_no_gradient_is_refused_by_name(twice: bool) -> None:
    """Its norm would be missing, and those of the layers after it would take its place."""
    model = gpt2()
    layer = model.transformer.ln_f
    model.transformer.ln_f = Beside(layer, layer if twice else nn.LayerNorm(32))
    groups = layer_groups(model.requires_grad_(True))
    with pytest.raises(ConfigError, match=r"^train: layer transformer\.ln_f\.\w+ got no gradient"):
        layer_gradients(model, groups, *records(3).batch(np.arange(3), CPU), None, 3)


def test_a_unit_with_one_layer_whose_gradient_is_not_finite_counts_as_zeros_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = gpt2().requires_grad_(True)
    groups, whole = layer_groups(model), layer_kinds.gradient_parts

    def parts(layer: nn.Module, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = {**whole(layer, *args)}
        if layer is model.transformer.ln_f:
            found["bias"] = found["bias"].index_fill(0, torch.tensor([1]), torch.inf)
        return found

    batch = records(3).batch(np.arange(3), CPU)
    others = torch.tensor([[1.0], [0.0], [1.0]], dtype=torch.float64).expand(-1, len(groups))
    expected = layer_gradients(model, groups, *batch, None, 3).weighted_sum(others)
    monkeypatch.setattr(engine, "gradient_parts", parts)
    found = layer_gradients(model, groups, *batch, None, 3)
    assert float(found.norms()[1].norm()) == 0.0
    assert float(found.norms()[[0, 2]].min()) > 0.0
    assert all(map(torch.equal, found.weighted_sum(torch.ones_like(others)), expected))


@pytest.mark.parametrize("base", [Flat, PerPair])
def test_a_clipper_that_gets_its_gradients_in_its_own_way_does_not_take_own_weights(base: Any) -> None:
    own = type("Own", (base,), {"gradients": lambda self, source: source.of_local_training(1, 0.1)})
    assert base().by_norm_alone
    assert not own().by_norm_alone
