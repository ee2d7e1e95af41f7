"""Layers that own weights cannot be trained in: each is refused by name before anything is charged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import CPU, gpt2, records
from torch import nn

from dptune.core.errors import ConfigError
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
